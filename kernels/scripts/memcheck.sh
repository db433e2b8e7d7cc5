#!/bin/bash
# compute-sanitizer's memcheck over every kernel on a few tokens: one process, then two (on one GPU, or one each where there
# are two). Exit status 0: no access is wrong and all results are right. MEMCHECK_S bounds each of the two.
set -u
export PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=lo MASTER_ADDR=127.0.0.1 OMP_NUM_THREADS=1
cd "$(dirname "$0")/../.."
status=0
for size in 1 2; do
  export WORLD_SIZE=$size MASTER_PORT=$((29500 + size))
  ranks=()
  for ((rank = 0; rank < size; rank++)); do
    # CUDA's bindings ask for symbols that a driver may lack: no error of ours. Other libraries' kernels are not checked.
    RANK=$rank timeout -k 5 "${MEMCHECK_S:-85}" compute-sanitizer --tool memcheck --report-api-errors no \
      --target-processes all --error-exitcode 9 --kernel-name kns=ep_ --port $((49152 + 32 * rank)) \
      python3 -m tests.kernels.every_kernel &
    ranks+=($!)
  done
  for pid in "${ranks[@]}"; do
    wait "$pid" || { said=$?; echo "memcheck: a rank of $size ended with status $said"; status=1; }
  done
done
exit $status
