#!/bin/bash
# Correctness and figures on a GPU host, in one command that ends within ten minutes:
#   device.sh [all | pytest -k expression | ""] [bench suite]
# The bench comes first, while nothing else runs. `all` on several GPUs shares the tests out to two of them, ranks of a
# process all on one; then come those that need several. With an expression, ranks have a GPU each as far as they go.
set -u
export PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=lo TORCH_CPP_LOG_LEVEL=ERROR
cd "$(dirname "$0")/../.."
gpus=$(nvidia-smi -L | wc -l)
python3 -c "
import torch, nvshmem, cuda.core, nvshmem.core as c
print(torch.__version__, torch.cuda.get_device_name(0), torch.cuda.device_count(), nvshmem.__version__, cuda.core.__version__, c.get_version())"

tests() { # NAME GPUS MARKER [arguments of pytest]
  local name=$1 which=$2 marker=$3
  shift 3
  CUDA_VISIBLE_DEVICES=$which timeout -s INT -k 10 "${TEST_S:-500}" python3 -m pytest -q -p no:cacheprovider -m "$marker" \
    --timeout "${LIMIT_S:-60}" --tb short -rs --durations 5 "$@" >"${OUT:-/tmp}/$name.log" 2>&1
  echo "$name: $(grep -E ' (passed|failed|error)' "${OUT:-/tmp}/$name.log" | tail -1)"
  grep -E '^(FAILED|ERROR)|^rounds checked' "${OUT:-/tmp}/$name.log"
}

if [ -n "${2:-}" ]; then
  # --commit: a copied working tree has no git; BENCH_ARGS: further options, such as --profile
  python3 -m ep_backend.bench.cli --suite "$2" --rounds "${ROUNDS:-200}" --seconds "${BENCH_S:-200}" \
    --commit "${COMMIT:-}" --output "${OUT:-.}/bench.jsonl" ${BENCH_ARGS:-}
fi
every=$(seq -s, 0 $((gpus - 1)))
if [ "${1:-}" = all ] && [ "$gpus" -gt 1 ]; then
  tests sequences 0 gpu tests/core/test_sequences.py &
  tests roundtrip 0 gpu tests/core/test_roundtrip.py -k "2ranks or 4ranks" &
  tests more-ranks 1 gpu tests/core/test_roundtrip.py -k "not 2ranks and not 4ranks" &
  tests core 1 gpu tests/core --ignore tests/core/test_roundtrip.py --ignore tests/core/test_sequences.py &
  tests kernels 1 gpu tests/kernels/test_kernels.py &
  tests rings 0 gpu tests/kernels --ignore tests/kernels/test_kernels.py &
  wait
  tests multigpu "$every" multigpu tests/core tests/kernels
elif [ "${1:-}" = all ]; then
  tests all "$every" gpu tests/core tests/kernels
elif [ -n "${1:-}" ]; then
  tests chosen "$every" "gpu or multigpu" tests/core tests/kernels -k "$1"
fi
