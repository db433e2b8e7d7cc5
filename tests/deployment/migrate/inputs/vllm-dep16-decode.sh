# The decode worker beside it. VLLM_MOE_DP_CHUNK_SIZE is gone from today's vLLM.
export VLLM_USE_DEEP_GEMM=1 VLLM_MOE_DP_CHUNK_SIZE=384 VLLM_SKIP_P2P_CHECK=1 VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
export NVIDIA_GDRCOPY=enabled GLOO_SOCKET_IFNAME=eth0
python3 -m dynamo.vllm --model /model-cache/deepseek-r1 --served-model-name deepseek-ai/DeepSeek-R1 \
  --all2all-backend deepep_low_latency --data-parallel-hybrid-lb --tensor-parallel-size 1 --data-parallel-size 16 \
  --enable-expert-parallel --max-model-len 16384 --enable-dbo --dbo-decode-token-threshold 32 --async-scheduling --enable-eplb \
  --eplb-config '{"window_size":"1000","step_interval":"3000","num_redundant_experts":"32","log_balancedness":"False"}' \
  --max-num-seqs 512 \
  --compilation_config '{"pass_config":{"fuse_norm_quant":true,"eliminate_noops":true},"cudagraph_mode":"FULL_DECODE_ONLY"}' \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
