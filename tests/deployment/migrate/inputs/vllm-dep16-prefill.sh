# The prefill worker of ai-dynamo/dynamo's recipes/deepseek-r1/vllm/disagg, Hopper, DEP16 (4806fa82), as a command.
export VLLM_USE_DEEP_GEMM=1 VLLM_SKIP_P2P_CHECK=1 VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1 NVIDIA_GDRCOPY=enabled GLOO_SOCKET_IFNAME=eth0
python3 -m dynamo.vllm --model /model-cache/deepseek-r1 --disaggregation-mode prefill \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}' --served-model-name deepseek-ai/DeepSeek-R1 \
  --all2all-backend deepep_high_throughput --data-parallel-hybrid-lb --tensor-parallel-size 1 --data-parallel-size 16 \
  --enable-expert-parallel --max-model-len 16384 --enable-dbo --dbo-decode-token-threshold 32 --async-scheduling --enable-eplb \
  --eplb-config '{"window_size":"1000","step_interval":"3000","num_redundant_experts":"32","log_balancedness":"False"}' \
  --max-num-seqs 512
