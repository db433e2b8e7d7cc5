# DeepSeek-V3.2 decode of SGLang's RoleBasedGroup page (rbg_pd, 0d65e592), leader's values: EP8 on one node, an abbreviated
# flag, the graphs bounded by --cuda-graph-max-bs.
docker run --gpus all --shm-size 64g -e SGLANG_ENABLE_JIT_DEEPGEMM=1 -e NCCL_IB_GID_INDEX=3 lmsysorg/sglang:latest \
  python3 -m sglang.launch_server --model-path /models/DeepSeek-V3.2 --served-model-name DeepSeek-V3 --tp 8 --dp-size 8 \
  --enable-dp-attention --moe-a2a-backend deepep --deepep-mode low_latency --disaggregation-mode decode --trust-remote \
  --chunked-prefill-size 131072 --mem-fraction-static 0.8 --cuda-graph-max-bs 32 --page-size 64 --port 8000 --host $(POD_IP)
