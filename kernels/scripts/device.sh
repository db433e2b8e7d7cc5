#!/bin/bash
# Correctness and figures on a GPU host, in one command that ends within ten minutes:
#   device.sh [all | pytest -k expression | ""] [bench suite]
# Where there are several GPUs, ranks have one each as far as they go, and the tests that need that run too.
set -u
export PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=lo TORCH_CPP_LOG_LEVEL=ERROR
cd "$(dirname "$0")/../.."
ranks=$(nvidia-smi -L | wc -l)
python3 -c "
import torch, nvshmem, cuda.core, nvshmem.core as c
print(torch.__version__, torch.cuda.get_device_name(0), torch.cuda.device_count(), nvshmem.__version__, cuda.core.__version__, c.get_version())"
if [ -n "${1:-}" ]; then
  which=gpu chosen=()
  [ "$ranks" -gt 1 ] && which="gpu or multigpu"
  [ "$1" != all ] && chosen=(-k "$1")
  timeout "${TEST_S:-540}" python3 -m pytest -q -p no:cacheprovider tests/core tests/kernels -m "$which" "${chosen[@]}" \
    --timeout 60 -rs --durations 8 2>&1 | tail -"${TAIL:-60}"
fi
if [ -n "${2:-}" ]; then
  # --commit: a copied working tree has no git; BENCH_ARGS: further options, such as --profile
  python3 -m ep_backend.bench.cli --suite "$2" --rounds "${ROUNDS:-200}" --seconds "${BENCH_S:-200}" \
    --commit "${COMMIT:-}" --output "${OUT:-.}/bench.jsonl" ${BENCH_ARGS:-}
fi
