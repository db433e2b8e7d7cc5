#!/bin/bash
# What is measured of both engines on a host of two H200, a call after the other; of a host with one H200, whose ranks take
# turns, what is right or wrong alone:
#   measure_all.sh [NAME…]    the runs of these names or engines, else all; none: unpack only
# A call takes those of the list, in order, that are not done and still fit into CALL_S seconds (570): call it again until
# all are done. Results and ends of logs are in RESULTS (/tmp/measure; without its NAME.json a run is done again), and after
# each run in $OUT/measured-FIRST-NAME.tgz. An engine's runs wait until both its packs have been carried (see
# kernels/scripts/engine.sh), in one call or in two. The answers of its own all-to-all are those of an earlier result,
# .bundle/reference-ENGINE.json, or cost a start more once.
set -uo pipefail
cd "$(dirname "$0")/../.."
results=${RESULTS:-/tmp/measure} out=${OUT:-/tmp}
mkdir -p "$results"
cp .bundle/reference-*.json "$results" 2>/dev/null

# Name, seconds as expected, and what measure.py is told; the most wanted come first. Overlap in a model as wide as
# DeepSeek-V3 (-wide) comes last: the small one's profiles tell whether there is any. SGLang takes 200 to 250 s to start with that
# one while DeepGEMM compiles; its next run on the machine finds that in ~/.cache/deep_gemm, which can be carried.
runs="
vllm-ours            225 timing deploy/h200x2-vllm-decode.yaml --modes low_latency,hybrid
vllm-decode          115 equality deploy/h200x2-vllm-decode.yaml --modes low_latency,hybrid
vllm-dbo             120 equality deploy/h200x2-vllm-dbo.yaml --modes low_latency,hybrid --profile
vllm-own             140 timing deploy/h200x2-vllm-decode.yaml --baseline
sglang-tbo           110 equality deploy/h200x2-sglang-tbo.yaml --profile
sglang-hybrid        160 equality deploy/h200x2-sglang.yaml --modes hybrid
vllm-eager           110 equality deploy/h200x2-vllm-decode.yaml --modes low_latency,hybrid --set enforce-eager=true
vllm-dbo-prefill     165 equality deploy/h200x2-vllm-dbo-prefill.yaml --modes direct,normal --profile
sglang-route         130 equality deploy/h200x2-sglang.yaml --modes direct,normal --engine-route
sglang-own           390 timing deploy/h200x2-sglang.yaml --baseline
sglang-ours          220 timing deploy/h200x2-sglang.yaml
vllm-eager-prefill   110 equality deploy/h200x2-vllm-prefill.yaml --modes direct,normal --set enforce-eager=true
vllm-dbo-wide        170 timing deploy/h200x2-vllm-dbo.yaml --sequences 64 --windows 1 --prompts
vllm-dbo-prefill-wide 190 timing deploy/h200x2-vllm-dbo-prefill.yaml --modes direct,normal --sequences 64 --windows 1 --prompts
sglang-tbo-wide      320 timing deploy/h200x2-sglang-tbo.yaml --sequences 64 --windows 1 --prompts
"

if [ "$(nvidia-smi -L 2>/dev/null | wc -l)" = 1 ]; then
  runs="
vllm-2x2-prefill     140 equality deploy/h200x4-vllm-prefill.yaml --modes normal,hybrid,direct --one-gpu
vllm-2x2-decode      110 equality deploy/h200x4-vllm-decode.yaml --modes low_latency,hybrid --one-gpu
vllm-2x2-dbo         140 equality deploy/h200x4-vllm-dbo.yaml --modes low_latency,hybrid --one-gpu
vllm-dbo-prefill     160 equality deploy/h200x2-vllm-dbo-prefill.yaml --modes direct,normal --profile --one-gpu
sglang-2x2-tbo       170 equality deploy/h200x4-sglang.yaml --modes auto,normal --one-gpu
sglang-route         160 equality deploy/h200x2-sglang.yaml --modes direct,normal --engine-route --one-gpu
"
fi

left() { echo $((${CALL_S:-570} - SECONDS)); }

chosen() {
  local name=$1 wish
  shift
  [ $# = 0 ] && return 0
  for wish; do [[ $wish == "$name" || $wish == "${name%%-*}" ]] && return 0; done
  return 1
}

for wish; do
  if [ "$wish" != none ] && ! grep -qE "^$wish( |-)" <<<"$runs"; then
    echo "no run and no engine is called $wish" >&2
    exit 2
  fi
done

declare -A unpacking ready
for engine in sglang vllm; do
  kernels/scripts/engine.sh "$engine" unpack &
  unpacking[$engine]=$!
done
for engine in sglang vllm; do wait "${unpacking[$engine]}" && ready[$engine]=1; done
echo "unpacked after $SECONDS s: ${!ready[*]}"

waiting=
while read -r name expected what; do
  [ -n "$name" ] && chosen "$name" "$@" || continue
  engine=${name%%-*}
  [ -f "$results/$name.json" ] && continue
  if [ -z "${ready[$engine]:-}" ]; then
    waiting+=" $name"
    continue
  fi
  given=()
  if [[ $what == equality* ]]; then
    if [ -f "$results/reference-$engine.json" ]; then
      given=(--reference "$results/reference-$engine.json")
    else
      expected=$((expected + 150))
    fi
  fi
  if [ "$expected" -gt "$(left)" ]; then
    waiting+=" $name"
    continue
  fi
  most=$((expected * 3 / 2)) began=$SECONDS # then it gives up, and takes some 15 s to stop the engine
  if [ $most -gt $(($(left) - 5)) ]; then most=$(($(left) - 5)); fi
  # shellcheck disable=SC2086 # words of the list
  kernels/scripts/engine.sh "$engine" sh "exec python3 deploy/scripts/measure.py $what ${given[*]} \
    --out $results/$name.json --seconds $most" >"$results/$name.out" 2>&1 </dev/null
  status=$?
  if [ ! -f "$results/reference-$engine.json" ] && grep -qs '"reference"' "$results/$name.json"; then
    cp "$results/$name.json" "$results/reference-$engine.json"
  fi
  echo "$name: status $status after $((SECONDS - began)) s, $expected expected; $(left) s left"
  tail -n 12 "$results/$name.out" | cut -c1-900
  tar -czf "$out/measured-${1:-all}.tgz" -C "$results" --exclude 'reference-*' .
done <<<"$runs"
echo "${waiting:+for another call:}${waiting:-all are done}"
for engine in vllm sglang; do
  if [ -f "$results/$engine-own.json" ] && [ -f "$results/$engine-ours.json" ]; then
    PYTHONPATH=$PWD:/tmp/ep-engine/$engine \
      python3 deploy/scripts/measure.py compare "$results/$engine-ours.json" "$results/$engine-own.json" || true
  fi
done
