# Decode beside sglang-h100-prefill.sh, from the same page.
python3 -m dynamo.sglang \
  --model-path /model/ --served-model-name deepseek-ai/DeepSeek-R1 --skip-tokenizer-init \
  --disaggregation-mode decode --disaggregation-transfer-backend nixl --disaggregation-bootstrap-port 30001 \
  --dist-init-addr ${HEAD_DECODE_NODE_IP}:29500 --nnodes 4 --node-rank 0 \
  --tp-size 32 --dp-size 32 --enable-dp-attention --decode-log-interval 1000 \
  --moe-a2a-backend deepep --prefill-round-robin-balance --page-size 1 --trust-remote-code \
  --moe-dense-tp-size 1 --enable-dp-lm-head --disable-radix-cache --watchdog-timeout 1000000 \
  --enable-two-batch-overlap --deepep-mode low_latency --mem-fraction-static 0.835 \
  --ep-num-redundant-experts 32 --cuda-graph-bs 128
