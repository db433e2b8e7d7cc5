# Prefill beside it.
docker run --gpus all --shm-size 64g lmsysorg/sglang:latest \
  python3 -m sglang.launch_server --model-path /models/DeepSeek-V3.2 --served-model-name DeepSeek-V3 --tp 8 --dp-size 8 \
  --enable-dp-attention --moe-a2a-backend deepep --deepep-mode normal --disaggregation-mode prefill --trust-remote \
  --chunked-prefill-size 131072 --mem-fraction-static 0.8 --page-size 64 --port 8000 --host $(POD_IP)
