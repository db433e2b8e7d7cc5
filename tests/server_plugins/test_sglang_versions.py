"""Older SGLang, from its wheel: the flag resolves and every hook finds its place, in each style of resolving arguments."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

pytest.importorskip("sglang", reason="the adapter's tests need SGLang: run ./ep test sglang")

from ep_backend.checkpoint import write_checkpoint
from ep_backend.settings import SETTINGS_VARIABLE
from server_plugins.sglang import NAME

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OLDER = {"0.5.17": "methods", "0.5.19": "pipeline"}
FLAGS = ["--device", "cuda", "--tp-size", "4", "--dp-size", "4", "--enable-dp-attention", "--deepep-mode", "normal"]

# What a launcher does and then a scheduler, up to where its model would be built. Names that this environment's
# transformers, newer than what these versions ask for, has by now may be registered once more.
PROCESS = """
import inspect, json, sys
from transformers import AutoConfig
register = AutoConfig.register
AutoConfig.register = staticmethod(lambda *a, **k: register(*a, **{**k, "exist_ok": True}))
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(sys.argv[1:])
if hasattr(args, "resolve_once"):
    args.resolve_once()
from sglang.srt.runtime_context import publish
publish(args, role="scheduler")
from server_plugins.sglang import compat
from sglang.srt.layers.moe import initialize_moe_config, utils
plan = compat.published_plan()
initialize_moe_config(*[args] * len(inspect.signature(initialize_moe_config).parameters))
import server_plugins.sglang.dispatcher
from sglang.srt.layers.moe.fused_moe_triton.layer import create_moe_dispatcher
print("SEEN", json.dumps({
    "version": compat.version(), "resolution": compat.resolution(), "mode": utils.get_deepep_mode().value,
    "backend": utils.get_moe_a2a_backend().value, "capacity": plan.model_dump(mode="json")["capacity"],
    "ours": create_moe_dispatcher.__wrapped__ is not None,
}))
"""


@pytest.fixture
def unpacked(tmp_path):
    def folder(version):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
        got = subprocess.run([*pip, f"sglang=={version}"], capture_output=True, text=True, timeout=240)
        wheels = list(tmp_path.glob("*.whl"))
        if not wheels:
            pytest.skip(f"pip cannot download sglang {version}: {got.stderr.strip()[-200:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(tmp_path / "sources")
        return tmp_path / "sources"

    return folder


@pytest.mark.parametrize("version", OLDER)
def test_an_older_version_takes_the_plugin(unpacked, tmp_path, version):
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(checkpoint)
    environment = {**os.environ, "PYTHONPATH": str(unpacked(version)), "HF_HUB_OFFLINE": "1", "SGLANG_PLUGINS": NAME}
    environment.pop(SETTINGS_VARIABLE, None)
    ran = subprocess.run(
        [sys.executable, "-c", PROCESS, "--model-path", str(checkpoint), *FLAGS, "--moe-a2a-backend", NAME],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
    )
    said = [line.removeprefix("SEEN ") for line in ran.stdout.split("\n") if line.startswith("SEEN ")]
    assert said, ran.stderr[-3000:]
    assert json.loads(said[0]) == {
        "version": version,
        "resolution": OLDER[version],
        "mode": "normal",
        "backend": "deepep",
        "capacity": {"direct": 1024},
        "ours": True,
    }
