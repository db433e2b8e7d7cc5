"""Launch scripts, run on this machine with stand-ins: what each node's engine is called with."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ep_backend.settings import Settings

from .conftest import GOLDEN, Call, Launcher


def flags(call: Call) -> str:
    return " ".join(call.arguments)


def test_a_worker_differs_from_the_leader_by_its_rank_alone(launcher: Launcher, rendered: Callable[..., Path]) -> None:
    script = rendered("vllm") / "decode" / "launch.sh"
    leader, worker = launcher.node(script, 0), launcher.node(script, 1)
    common = ["serve", "/models/DeepSeek-V3", "--config", str(script.with_name("engine.yaml")), "--data-parallel-address"]
    assert leader.arguments == [*common, "127.0.0.1", "--api-server-count", "2", "--host", "0.0.0.0", "--port", "22000"]
    assert worker.arguments == [*common, "127.0.0.1", "--headless", "--data-parallel-start-rank", "8"]
    assert {key for key in leader.env if leader.env[key] != worker.env.get(key)} == {"NODE"}


def test_sglang_nodes_differ_by_their_rank_alone(launcher: Launcher, rendered: Callable[..., Path]) -> None:
    script = rendered("sglang") / "prefill" / "launch.sh"
    leader, worker = launcher.node(script, 0), launcher.node(script, 1)
    assert leader.program == "sglang"
    assert leader.arguments[:4] == ["-m", "sglang.launch_server", "--config", str(script.with_name("engine.yaml"))]
    assert leader.arguments[-4:] == ["--dist-init-addr", "127.0.0.1:20100", "--node-rank", "0"]
    assert worker.arguments == [*leader.arguments[:-1], "1"]
    assert worker.env["SGLANG_HOST_IP"] == "127.0.0.1"
    single = launcher.node(script.parents[1] / "decode" / "launch.sh", 0)
    assert "--dist-init-addr" not in single.arguments


def test_the_environment_of_a_rank(launcher: Launcher, rendered: Callable[..., Path]) -> None:
    """The role's variables as they were written, the settings where the plug-in looks, this node's address and NICs."""
    script = rendered("vllm", ("GLOO_SOCKET_IFNAME: eth0", """GLOO_SOCKET_IFNAME: eth0\n      ODD: "a 'b' $(c) \\\\ d" """))
    env = launcher.node(script / "prefill" / "launch.sh", 1, CUDA_VISIBLE_DEVICES="7,6,5,4,3,2,GPU-1111,0").env
    assert env["ODD"] == "a 'b' $(c) \\ d"
    settings = Settings.model_validate_json(Path(env["EP_BACKEND_SETTINGS"]).read_text())
    assert settings.role is not None
    assert (settings.role.value, settings.mode, settings.gpus_per_node) == ("prefill", "hybrid", 8)
    assert env["VLLM_HOST_IP"] == env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    reversed_nics = ",".join(f"mlx5_{gpu}:1:1" for gpu in range(7, -1, -1))
    assert env["NVSHMEM_HCA_PE_MAPPING"] == reversed_nics
    assert env["NVSHMEM_ENABLE_NIC_PE_MAPPING"] == "1"


@pytest.mark.parametrize(
    ("env", "code", "complaint"),
    [
        ({"NODE": "2", "LEADER": "127.0.0.1"}, 2, "launch.sh: NODE=2, must be 0 to 1"),
        ({"NODE": "08", "LEADER": "127.0.0.1"}, 2, "launch.sh: NODE=08, must be 0 to 1"),
        ({"NODE": "-1", "LEADER": "127.0.0.1"}, 2, "launch.sh: NODE=-1, must be 0 to 1"),
        ({"LEADER": "127.0.0.1"}, 1, "NODE: is the number of this node, 0 for the leader, up to 1"),
        ({"NODE": "0"}, 1, "LEADER: is the name or address of node 0"),
        (
            {"NODE": "0", "LEADER": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "0,1"},
            1,
            "CUDA_VISIBLE_DEVICES=0,1 shows 2 GPUs for 8 ranks; name 8 of them",
        ),
    ],
)
def test_a_wrong_start_ends_before_the_engine(
    env: dict[str, str], code: int, complaint: str, launcher: Launcher, rendered: Callable[..., Path]
) -> None:
    ended, error, calls = launcher.run(rendered("vllm") / "decode" / "launch.sh", **env)
    assert (ended, calls) == (code, [])
    assert complaint in error
    assert "Traceback" not in error


def test_an_environment_without_the_package_is_told(launcher: Launcher, rendered: Callable[..., Path]) -> None:
    script = rendered("vllm") / "decode" / "launch.sh"
    (launcher.programs / "python3").write_text("#!/bin/sh\nexit 1\n")
    code, error, calls = launcher.run(script, NODE="0", LEADER="127.0.0.1")
    assert (code, calls) == (1, [])
    assert error == f"launch.sh: {launcher.programs}/python3 has no ep_backend; install it beside the engine\n"


def test_the_router_asks_the_leaders(launcher: Launcher, rendered: Callable[..., Path]) -> None:
    code, error, calls = launcher.run(rendered("vllm") / "router.sh", PREFILL="a", DECODE="b")
    assert code == 0, error
    assert "--prefill http://a:20000 --decode http://b:22000" in flags(calls[0])
    code, error, calls = launcher.run(rendered("sglang") / "router.sh", PREFILL="a", DECODE="b", LISTEN="0.0.0.0")
    assert "--host 0.0.0.0 --port 8000" in flags(calls[0])
    assert "--pd-disaggregation --prefill http://a:20000 20050 --decode http://b:22000" in flags(calls[0])
    code, error, calls = launcher.run(rendered("sglang") / "router.sh", PREFILL="a")
    assert code != 0 and calls == [] and "DECODE: is the name or address of the decode leader" in error


UNIFIED = """\
name: one
topology: {preset: h200-nvl8-cx7, nodes: %d}
model: {preset: deepseek-v3, source: /models/DeepSeek-V3}
roles:
  unified:
    nodes: %d
    data_parallel: %d
    ep: {max_tokens: 8192, fp8: true}
    args: {max-num-batched-tokens: 8192}
    env: {GLOO_SOCKET_IFNAME: eth0, NCCL_SOCKET_IFNAME: eth0, NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME: eth0}
target:
  kind: slurm
  image: {name: registry.example/vllm-ep:1, packages: {vllm: 0.32.0, torch: 2.13.0}}
  pod: {shm: 64GiB, rdma: {rdma/ib: 8}, capabilities: [IPC_LOCK]}
"""


@pytest.mark.parametrize(
    ("router", "nodes", "kinds", "host"),
    [
        ("", 2, ("slurm",), "0.0.0.0"),
        ("", 2, ("lws",), "0.0.0.0"),
        ("", 2, ("shell",), "0.0.0.0"),
        ("", 1, ("slurm",), "0.0.0.0"),
        ("", 1, ("shell",), "127.0.0.1"),
        ("", 1, ("shell", "lws"), "0.0.0.0"),
        ("router: {port: 8001}\n", 2, ("slurm",), "0.0.0.0"),
        ("router: {host: 10.1.2.3}\n", 2, ("slurm",), "10.1.2.3"),
        ("router: {host: '::'}\n", 2, ("lws",), "::"),
        ("router: {host: 127.0.0.1}\n", 2, ("slurm",), "127.0.0.1"),
    ],
)
def test_clients_reach_it_where_the_file_says_or_from_other_hosts(
    router: str, nodes: int, kinds: tuple[str, ...], host: str, launcher: Launcher, rendered: Callable[..., Path]
) -> None:
    """Of a pair the router, of a unified role its leader; where the file gives no address, the one that others reach."""
    golden = (GOLDEN / "vllm.yaml").read_text()
    unified = rendered("vllm", (golden, UNIFIED % (nodes, nodes, 8 * nodes) + router), kinds=kinds)
    assert f"--host {host} --port" in flags(launcher.node(unified / "unified" / "launch.sh", 0))
    if nodes == 2:
        pair = rendered("vllm", ("target:\n", f"{router}target:\n"), kinds=kinds)
        _, error, (call,) = launcher.run(pair / "router.sh", PREFILL="a", DECODE="b")
        assert f"--host {host} --port" in flags(call), error


def test_render_says_where_clients_reach_it(launcher: Launcher, rendered: Callable[..., Path]) -> None:
    def said(text: str, kind: str) -> str:
        (launcher.folder / "d.yaml").write_text(text)
        command = [sys.executable, "-m", "ep_backend", "render", "d.yaml", "--for", kind, "--out", "said"]
        done = subprocess.run(command, cwd=launcher.folder, capture_output=True, text=True, timeout=60, check=True)
        return done.stderr

    one, two = UNIFIED % (1, 1, 8), UNIFIED % (2, 2, 16)
    assert "clients reach 127.0.0.1:8000 on its own host only; for others set `router: {host: 0.0.0.0}` in d.yaml\n" in said(
        one, "shell"
    )
    assert "warning: d.yaml:6:5: roles.unified.nodes: spans 2 NVLink domains, between which only hybrid" in said(two, "slurm")
    assert said(two.replace("max_tokens", "mode: hybrid, rail: put, max_tokens"), "slurm") == (
        "whoever reaches the router at port 8000 can send requests; `router: {host: ADDRESS}` in d.yaml narrows it\n"
    )
    loud = said(two + "router: {host: localhost}\n", "shell")
    assert "warning: d.yaml:15:10: router.host: is localhost, which only clients on the router's own host reach; set" in loud


def test_the_batch_job_starts_every_role_on_its_own_nodes(launcher: Launcher, rendered: Callable[..., Path]) -> None:
    folder = rendered("vllm")
    (launcher.programs / "scontrol").write_text("#!/bin/bash\nprintf 'n%s\\n' 1 2 3 4\n")
    (launcher.programs / "scontrol").chmod(0o755)
    # Steps that go on: the first that ends would end the job.
    srun = launcher.programs / "srun"
    srun.write_text(srun.read_text() + "import time; time.sleep(1)\n")
    code, error, calls = launcher.run(folder / "job.sbatch", SLURM_SUBMIT_DIR=str(folder), SLURM_JOB_NODELIST="n[1-4]")
    assert code == 0, error
    steps = {call.arguments[-1]: call for call in calls}
    prefill, decode = (steps[f"NODE=$SLURM_PROCID exec bash {role}/launch.sh"] for role in ("prefill", "decode"))
    assert "--nodes=2 --ntasks=2 --relative=0" in flags(prefill) and prefill.env["LEADER"] == "n1"
    assert "--nodes=2 --ntasks=2 --relative=2" in flags(decode) and decode.env["LEADER"] == "n3"
    router = steps["router.sh"]
    assert "--relative=0" in flags(router) and (router.env["PREFILL"], router.env["DECODE"]) == ("n1", "n3")
    assert f"--container-mounts={folder}:{folder},/models/DeepSeek-V3:/models/DeepSeek-V3" in prefill.arguments
