"""A batch job: one step a role, each node of it the role's launch script, and a step for the router."""

import shlex
from collections.abc import Sequence

from ep_backend.deployment.render.role import LAUNCH, RoleFiles, source
from ep_backend.deployment.render.router import ROUTER
from ep_backend.deployment.render.text import HEADER
from ep_backend.deployment.resolve import topology
from ep_backend.deployment.schema import Deployment

JOB = "job.sbatch"


def job(deployment: Deployment, roles: Sequence[RoleFiles]) -> str:
    gpus = topology(deployment.topology).gpus_per_node or max(part.ranks_a_node for part in roles)
    options = {
        "job-name": deployment.name,
        "nodes": sum(part.role.nodes for part in roles),
        "ntasks-per-node": 1,
        **({"gpus-per-node": gpus} if deployment.topology.device == "cuda" else {}),
        "output": "%x-%j.log",
    }
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in options.items()),
        "#SBATCH --exclusive",
        HEADER.rstrip(),
        f"# Submit from the folder of this file, on a file system that all nodes see: sbatch {JOB}",
        "# The first step that ends takes the others with it.",
        "set -euo pipefail",
        'cd "$SLURM_SUBMIT_DIR"',
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT",
        "",
    ]
    first = 0
    for part in roles:
        nodes = part.role.nodes
        lines += [
            f"# {part.name}: nodes {first} to {first + nodes - 1} of the job" if nodes > 1 else f"# {part.name}: node {first}",
            f"LEADER=${{hosts[{first}]}} srun --nodes={nodes} --ntasks={nodes} --relative={first} --kill-on-bad-exit=1"
            f"{_container(deployment, part)} \\",
            f"    bash -c 'NODE=$SLURM_PROCID exec bash {part.name}/{LAUNCH}' &",
        ]
        first += nodes
    if len(roles) > 1:
        lines += [
            f"PREFILL=${{hosts[0]}} DECODE=${{hosts[{roles[0].role.nodes}]}} srun --overlap --nodes=1 --ntasks=1 --relative=0"
            f"{_container(deployment, roles[0])} bash {ROUTER} &",
        ]
    return "\n".join([*lines, "wait -n", ""])


def _container(deployment: Deployment, part: RoleFiles) -> str:
    """Options of the pyxis plug-in, where the file names an image."""
    image = (part.role.image or deployment.target.image).name
    if image is None:
        return ""
    model = source(deployment)
    mounts = '"$PWD:$PWD"' + (shlex.quote(f",{model}:{model}") if model.startswith("/") else "")
    return f' --container-image={shlex.quote(image)} --container-mounts={mounts} --container-workdir="$PWD"'
