# Two nodes of 8 in the spelling of vLLM's docs/serving/expert_parallel_deployment.md (01702569): a variable for the
# backend, and a comment after each backslash.
# first node
VLLM_ALL2ALL_BACKEND=deepep_low_latency VLLM_USE_DEEP_GEMM=1 \
    vllm serve deepseek-ai/DeepSeek-V3-0324 \
    --tensor-parallel-size 1 \               # within a data-parallel rank
    --enable-expert-parallel \               # don't forget
    --data-parallel-size 16 \                # of both nodes
    --data-parallel-size-local 8 \
    --data-parallel-address 192.168.1.100 \  # the first node's
    --data-parallel-rpc-port 13345 \
    --api-server-count=8

# second node
VLLM_ALL2ALL_BACKEND=deepep_low_latency VLLM_USE_DEEP_GEMM=1 \
    vllm serve deepseek-ai/DeepSeek-V3-0324 \
    --tensor-parallel-size 1 \
    --enable-expert-parallel \
    --data-parallel-size 16 \
    --data-parallel-size-local 8 \
    --data-parallel-start-rank 8 \
    --data-parallel-address 192.168.1.100 \
    --data-parallel-rpc-port 13345 \
    --headless
