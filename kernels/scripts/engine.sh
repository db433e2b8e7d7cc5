#!/bin/bash
# An engine's tests on a GPU host without one, a step a command that ends within ten minutes:
#   engine.sh vllm|sglang layers [pytest arguments]   real experts behind the plug-in, in processes that share the GPU
#   engine.sh vllm|sglang one_rank                    the engine itself with the plug-in installed and another backend chosen
#   engine.sh vllm|sglang sh 'COMMANDS'              others, such as deploy/scripts/measure.py, with the engine on Python's path
#   engine.sh vllm|sglang unpack                      no more than that; fails until both packs have been carried
# Unpacks what bundle.py packed and the command carried (.bundle/ENGINE-*.tar.xz), over what commands before it left in /tmp:
# layers needs ENGINE-layers.tar.xz, the others ENGINE-server.tar.xz as well. CUDA images are carried too (ep_backend/images), or
# compiled here.
set -euo pipefail
cd "$(dirname "$0")/../.."
engine=$1 step=$2
shift 2
site=/tmp/ep-engine/$engine
log=${OUT:-/tmp}/$engine-$step.log
export PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=lo TORCH_CPP_LOG_LEVEL=ERROR NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
export HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1
export VLLM_USE_FLASHINFER_SAMPLER=0 # else its sampler imports flashinfer
export SGLANG_IS_FLASHINFER_AVAILABLE=false # else SGLang imports more of it than the bundle has
export SGLANG_JIT_DEEPGEMM_PRECOMPILE=0 # else the first product compiles all sizes
started=$SECONDS
shopt -s nullglob
mkdir -p "$site"
for part in .bundle/"$engine"-*.tar.xz; do
  known=$site/.$(basename "$part")
  if [ "$known" -nt "$part" ]; then continue; fi
  tar -xJf "$part" -C "$site"
  unpacked=1
  rm -f "$site/.named"
  touch "$known"
done
if [ "$step" != unpack ] && [ ! -d "$site/$engine" ]; then
  echo "$engine is not on this machine: carry .bundle/$engine-layers.tar.xz, which kernels/scripts/bundle.py makes" >&2
  exit 2
fi
unset PYTHONDONTWRITEBYTECODE
if [ -n "${unpacked:-}" ]; then
  # An engine's processes import one after the other, what the host has of torch too, and that may lack bytecode.
  installed=$(python3 -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("torch").origin).parents[1])')
  python3 -m compileall -q -j 0 "$site" "$installed" >/dev/null 2>&1 || true # some files are templates
fi
if [ "$step" = unpack ]; then exec test -f "$site/.$engine-layers.tar.xz" -a -f "$site/.$engine-server.tar.xz"; fi
if [ ! -f ep_backend/images/images.json ]; then python3 kernels/build.py >/dev/null; fi
EP_CUDA=0 python3 setup.py -q egg_info # the plug-in's entry point
echo "unpacked and built in $((SECONDS - started)) s"
# Once after unpacking: imports take seconds.
[ -f "$site/.named" ] || PYTHONPATH=$PWD:$site python3 - "$engine" <<'EOF'
import importlib.metadata as m, sys, time
began = time.monotonic()
import torch, nvshmem.core
print(f"torch and NVSHMEM imported in {time.monotonic() - began:.1f} s")
names = [sys.argv[1], "torch", "triton", "transformers", "nvshmem4py-cu13", "cuda-core"]
print(torch.cuda.get_device_name(0), "CUDA", torch.version.cuda, "NVSHMEM", nvshmem.core.get_version().libnvshmem_version)
print(*(f"{name} {m.version(name)}" for name in names), sep=", ")
EOF
touch "$site/.named"
left=$((570 - (SECONDS - started)))
case $step in
layers)
  export VLLM_LOGGING_LEVEL=WARNING
  PYTHONPATH=$PWD:$site timeout $left python3 -m pytest -q -s --tb=short -p no:cacheprovider --timeout $left \
    "tests/server_plugins/test_${engine}_gpu.py" "$@" 2>&1 | tee "$log"
  ;;
one_rank)
  model=/tmp/ep-engine/checkpoint
  PYTHONPATH=$PWD:$site python3 -m ep_backend checkpoint "$model" --model deepseek-v3-100m
  for plugin in without with; do
    PYTHONPATH=$([ $plugin = with ] && echo "$PWD:")$site timeout $((left / 2)) \
      python3 kernels/scripts/one_rank.py "$engine" "$model" "/tmp/ep-engine/$engine-$plugin.json" 2>&1 | tee -a "$log"
  done
  python3 - "$engine" <<'EOF'
import json, sys
without, with_it = (json.load(open(f"/tmp/ep-engine/{sys.argv[1]}-{plugin}.json")) for plugin in ("without", "with"))
assert not without["known"] and with_it["known"], "the plug-in must be there in the second start alone"
assert with_it["tokens"] == without["tokens"], f"answers differ: {with_it['tokens']} with the plug-in, {without['tokens']} without"
print(f"equal with and without the plug-in: {sum(map(len, with_it['tokens']))} tokens of {len(with_it['tokens'])} prompts")
EOF
  ;;
sh)
  PYTHONPATH=$PWD:$site timeout $left bash -c "$1" 2>&1 | tee "$log"
  ;;
*)
  echo "no step '$step': layers, one_rank or sh" >&2
  exit 2
  ;;
esac
