# Prefill of the 96 H100 setup in its first spelling (sgl-project/sglang issue 6017).
python3 -m sglang.launch_server --model-path /dev/shm/DeepSeek-V3-0324 --disaggregation-mode prefill \
  --disaggregation-ib-device mlx5_1 --dist-init-addr 10.5.55.3:5757 --nnodes 4 --node-rank 0 \
  --tp-size 32 --dp-size 32 --enable-dp-attention --decode-log-interval 1 \
  --enable-deepep-moe --page-size 1 --host 0.0.0.0 --trust-remote-code --moe-dense-tp-size 1 --enable-dp-lm-head \
  --disable-radix-cache --watchdog-timeout 1000000 --enable-two-batch-overlap --deepep-mode normal \
  --mem-fraction-static 0.85 --chunked-prefill-size 524288 --max-running-requests 8192 --max-total-tokens 131072 \
  --context-length 8192 --init-expert-location /configs/prefill_in1000out1000.json --ep-num-redundant-experts 32 \
  --ep-dispatch-algorithm dynamic --eplb-algorithm deepseek \
  --deepep-config '{"normal_dispatch": {"num_sms": 24}, "normal_combine": {"num_sms": 24}}'
