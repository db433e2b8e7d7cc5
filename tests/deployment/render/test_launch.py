"""Launch scripts, run on this machine with stand-ins: what each node's engine is called with."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ep_backend.settings import Settings

from .conftest import Call, Launcher


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
