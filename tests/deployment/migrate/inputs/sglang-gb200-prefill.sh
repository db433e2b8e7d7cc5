# Prefill on 2 trays of 4 GB200 in low_latency (ai-dynamo/dynamo's docs/backends/sglang/dsr1-wideep-gb200.md, 119290c3).
SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=2048 \
MC_TE_METRIC=true \
SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE=100000 \
SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT=100000 \
SGLANG_DISAGGREGATION_WAITING_TIMEOUT=100000 \
SGLANG_MOONCAKE_CUSTOM_MEM_POOL=True \
MC_FORCE_MNNVL=1 \
NCCL_MNNVL_ENABLE=1 \
NCCL_CUMEM_ENABLE=1 \
SGLANG_USE_MESSAGE_QUEUE_BROADCASTER=0 \
SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK=1 \
PYTHONUNBUFFERED=1 \
python3 -m dynamo.sglang \
  --served-model-name deepseek-ai/DeepSeek-R1 --model-path /model/ --skip-tokenizer-init --trust-remote-code \
  --disaggregation-mode prefill --dist-init-addr ${HEAD_PREFILL_NODE_IP}:29500 --disaggregation-bootstrap-port 30001 \
  --nnodes 2 --node-rank 0 --tp-size 8 --dp-size 8 --enable-dp-attention --host 0.0.0.0 --decode-log-interval 1 \
  --max-running-requests 6144 --context-length 2716 --disable-radix-cache --enable-deepep-moe --deepep-mode low_latency \
  --moe-dense-tp-size 1 --enable-dp-lm-head --disable-shared-experts-fusion --ep-num-redundant-experts 32 \
  --ep-dispatch-algorithm static --eplb-algorithm deepseek --attention-backend cutlass_mla --watchdog-timeout 1000000 \
  --disable-cuda-graph --chunked-prefill-size 16384 --max-total-tokens 32768 --mem-fraction-static 0.8 --log-level debug
