#!/bin/bash
# Written by `ep-backend render`; change the deployment file instead.
set -euo pipefail
# A node of small's decode role: `NODE=0 LEADER=HOST bash launch.sh`. Nodes differ in NODE alone;
# LEADER is node 0 as the others reach it. ADDRESS: this node's own, default that of its route to the leader;
# LISTEN: where the leader takes requests.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NODE=${NODE:-0}
LEADER=${LEADER:?is the name or address of node 0}
if ! [[ $NODE =~ ^(0|[1-9][0-9]*)$ ]] || ((NODE > 0)); then
    echo "launch.sh: NODE=$NODE, must be 0" >&2
    exit 2
fi

export EP_BACKEND_SETTINGS=$here/settings.json
if ! python3 -c 'import ep_backend' 2> /dev/null; then
    echo "launch.sh: $(command -v python3 || echo python3) has no ep_backend; install it beside the engine" >&2
    exit 1
fi
# Of this node: LEADER and ADDRESS as addresses
facts=$(python3 -m ep_backend.deployment.node --ranks 8 --leader "$LEADER")
eval "$facts"

export SGLANG_HOST_IP=$ADDRESS
arguments=(
    --config "$here/engine.yaml"
    --host "${LISTEN:-0.0.0.0}" --port 22000
)
exec python3 -m sglang.launch_server "${arguments[@]}"
