#!/bin/bash
# Written by `ep-backend render`; change the deployment file instead.
set -euo pipefail
# A node of small's decode role: `NODE=0 LEADER=HOST bash launch.sh`. Nodes differ in NODE alone;
# LEADER is node 0 as the others reach it. ADDRESS: this node's own, default that of its route to the leader;
# LISTEN: where the leader takes requests.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NODE=${NODE:?is the number of this node, 0 for the leader, up to 1}
LEADER=${LEADER:?is the name or address of node 0}
if ! [[ $NODE =~ ^(0|[1-9][0-9]*)$ ]] || ((NODE > 1)); then
    echo "launch.sh: NODE=$NODE, must be 0 to 1" >&2
    exit 2
fi

export EP_BACKEND_SETTINGS=$here/settings.json
export GLOO_SOCKET_IFNAME=eth0
export NCCL_SOCKET_IFNAME=eth0
export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
if ! python3 -c 'import ep_backend' 2> /dev/null; then
    echo "launch.sh: $(command -v python3 || echo python3) has no ep_backend; install it beside the engine" >&2
    exit 1
fi
# Of this node: LEADER and ADDRESS as addresses, the ranks' HCAs
facts=$(python3 -m ep_backend.deployment.node --ranks 8 --devices mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_7 --leader "$LEADER")
eval "$facts"

export VLLM_HOST_IP=$ADDRESS
export VLLM_NIXL_SIDE_CHANNEL_HOST=$ADDRESS VLLM_NIXL_SIDE_CHANNEL_PORT=22400
arguments=(
    serve
    /models/DeepSeek-V3
    --config "$here/engine.yaml"
    --data-parallel-address "$LEADER"
)
if ((NODE == 0)); then
    arguments+=(--api-server-count 2 --host "${LISTEN:-0.0.0.0}" --port 22000)
else
    arguments+=(--headless --data-parallel-start-rank $((NODE * 8)))
fi
exec vllm "${arguments[@]}"
