# Decode of the same setup: 9 nodes, 256 requests a rank; the capacity is raised to match.
SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=256 python3 -m sglang.launch_server \
  --model-path /dev/shm/DeepSeek-V3-0324 --disaggregation-mode decode --disaggregation-ib-device mlx5_1 \
  --dist-init-addr 10.5.55.7:5757 --nnodes 9 --node-rank 0 --tp-size 72 --dp-size 72 --enable-dp-attention \
  --decode-log-interval 1 --enable-deepep-moe --page-size 1 --host 0.0.0.0 --trust-remote-code --moe-dense-tp-size 1 \
  --enable-dp-lm-head --disable-radix-cache --watchdog-timeout 1000000 --enable-two-batch-overlap \
  --deepep-mode low_latency --mem-fraction-static 0.835 --max-running-requests 18432 --context-length 4500 \
  --init-expert-location /configs/decode_in500out1500.json --ep-num-redundant-experts 32 --cuda-graph-bs 256
