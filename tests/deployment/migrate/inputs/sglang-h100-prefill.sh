# Prefill on 4 nodes of 8 H100, as ai-dynamo/dynamo's docs/backends/sglang/dsr1-wideep-h100.md has it (commit 119290c3).
python3 -m dynamo.sglang \
  --model-path /model/ --served-model-name deepseek-ai/DeepSeek-R1 --skip-tokenizer-init \
  --disaggregation-mode prefill --disaggregation-transfer-backend nixl --disaggregation-bootstrap-port 30001 \
  --dist-init-addr ${HEAD_PREFILL_NODE_IP}:29500 --nnodes 4 --node-rank 0 \
  --tp-size 32 --dp-size 32 --enable-dp-attention --decode-log-interval 1000 \
  --moe-a2a-backend deepep --load-balance-method round_robin --page-size 1 --trust-remote-code \
  --moe-dense-tp-size 1 --enable-dp-lm-head --disable-radix-cache --watchdog-timeout 1000000 \
  --enable-two-batch-overlap --deepep-mode normal --mem-fraction-static 0.85 --deepep-config /configs/deepep.json \
  --ep-num-redundant-experts 32 --ep-dispatch-algorithm dynamic --eplb-algorithm deepseek
