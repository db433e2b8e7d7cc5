#!/bin/bash
# Written by `ep-backend render`; change the deployment file instead.
set -euo pipefail
# Before small's prefill and decode: `PREFILL=HOST DECODE=HOST bash router.sh`, with their leaders.
# LISTEN: another address than router.host for clients.
PREFILL=${PREFILL:?is the name or address of the prefill leader}
DECODE=${DECODE:?is the name or address of the decode leader}
arguments=(
    --host "${LISTEN:-0.0.0.0}" --port 8000 --policy round_robin
    --disable-retries --worker-startup-timeout-secs 2700
    --pd-disaggregation
    --prefill "http://$PREFILL:20000" 20050
    --decode "http://$DECODE:22000"
)
exec python3 -m sglang_router.launch_router "${arguments[@]}"
