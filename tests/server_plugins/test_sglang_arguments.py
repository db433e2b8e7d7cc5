"""The flag in SGLang's parser and resolution, for a DeepSeek-V3 on CUDA without a GPU; what is refused, and why."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="the adapter's tests need SGLang: run ./ep test sglang")

from ep_backend.checkpoint import write_checkpoint
from ep_backend.modes import Family, Mode
from ep_backend.policy import Role
from ep_backend.settings import SETTINGS_VARIABLE
from server_plugins.sglang import NAME, arguments, compat
from server_plugins.sglang.choice import CAPACITY_VARIABLE
from server_plugins.sglang.plan import Plan

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
FOUR = ["--tp-size", "4", "--attn-dp-size", "4"]
# SGLang's own defaults, where it finds no GPU: a chunk of 4096 for all attention groups, decode graphs of up to 160.
CHUNK, GRAPH = 1024, 160
EAGLE = ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
EAGLE += ["--speculative-num-draft-tokens", "4"]
PD = ["--disaggregation-transfer-backend", "nixl", "--disaggregation-mode"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sglang") / "checkpoint"
    write_checkpoint(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    monkeypatch.delenv(CAPACITY_VARIABLE, raising=False)


@pytest.fixture
def parse(checkpoint):
    """ServerArgs as `sglang serve` would make them, not yet resolved."""
    from sglang.srt.plugins import load_plugins

    load_plugins()

    def parsed(*flags, backend=NAME):
        from sglang.srt.server_args import prepare_server_args

        usual = ["--model-path", checkpoint, "--device", "cuda", *FOUR, "--moe-a2a-backend", backend]
        return prepare_server_args([*usual, *flags])

    return parsed


@pytest.fixture
def resolve(parse):
    def resolved(*flags, **more):
        args = parse(*flags, **more)
        args.resolve_once()
        return args

    return resolved


@pytest.fixture
def settings(tmp_path, monkeypatch):
    def write(**content):
        path = tmp_path / "settings.json"
        path.write_text(json.dumps(content))
        monkeypatch.setenv(SETTINGS_VARIABLE, str(path))

    return write


def plan_of(args):
    return Plan.parse(args.resolved_dict()["deepep_config"])


def graphs(args):
    config = args.resolved_dict()["cuda_graph_config"]
    return config["decode"]["backend"], config["prefill"]["backend"]


def test_the_command_line_knows_the_flag(parse):
    args = parse("--speculative-moe-a2a-backend", NAME)
    assert (args.moe_a2a_backend, args.speculative_moe_a2a_backend) == (NAME, NAME)
    with pytest.raises(SystemExit):
        parse(backend="no_such_backend")


def test_sglangs_own_configuration_file_knows_the_flag(parse, checkpoint, tmp_path):
    from sglang.srt.server_args import prepare_server_args

    file = tmp_path / "serve.yaml"
    file.write_text(f"model-path: {checkpoint}\ndevice: cuda\ntp-size: 4\nattn-dp-size: 4\nmoe-a2a-backend: {NAME}\n")
    args = prepare_server_args(["--config", str(file)])
    args.resolve_once()
    assert plan_of(args).ranks == 4


def test_the_engine_class_knows_the_name(parse, checkpoint):
    from sglang.srt.entrypoints.engine import Engine

    args = Engine.server_args_class(model_path=checkpoint, device="cuda", tp_size=4, attn_dp_size=4, moe_a2a_backend=NAME)
    args.resolve_once()
    assert plan_of(args).ranks == 4


def test_resolution_is_deepeps_but_for_the_name(resolve):
    ours, theirs = resolve().resolved_dict(), resolve(backend="deepep").resolved_dict()
    differ = {key for key in ours if ours[key] != theirs[key]} - {"random_seed", "nccl_port"}
    assert differ == {"moe_a2a_backend", "deepep_config", "max_running_requests"}
    assert (ours["moe_a2a_backend"], ours["ep_size"], ours["deepep_mode"]) == (NAME, 4, "auto")
    assert theirs["deepep_config"] is None


def test_other_backends_notice_nothing(resolve):
    args = resolve(backend="none").resolved_dict()
    assert (args["moe_a2a_backend"], args["ep_size"], args["deepep_config"]) == ("none", 1, None)


def test_name_and_plan_survive_the_way_to_the_scheduler(resolve):
    args = resolve()
    assert plan_of(pickle.loads(pickle.dumps(args))) == plan_of(args)


def test_without_settings_capacities_are_sglangs_own_limits(resolve):
    args = resolve()
    plan = plan_of(args)
    assert plan.families == (Family.PREFILL, Family.DECODE)
    assert plan.capacity == {Mode.DIRECT: CHUNK, Mode.LOW_LATENCY: GRAPH}
    assert args.resolved_dict()["max_running_requests"] == 4 * GRAPH
    assert (plan.lanes, plan.nodes, plan.fabric, plan.decode_graphs) == (1, 1, "nvshmem", True)


@pytest.mark.parametrize(
    ("flags", "content", "role", "deepep_mode", "capacity"),
    [
        ([*PD, "prefill"], {}, Role.PREFILL, "normal", {Mode.DIRECT: CHUNK}),
        ([*PD, "decode"], {}, Role.DECODE, "low_latency", {Mode.LOW_LATENCY: GRAPH}),
        ([*PD, "prefill"], {"mode": "normal"}, Role.PREFILL, "normal", {Mode.NORMAL: CHUNK}),
        ([*PD, "decode"], {"mode": "hybrid", "role": "decode"}, Role.DECODE, "low_latency", {Mode.HYBRID: GRAPH}),
        ([], {"mode": "direct"}, Role.UNIFIED, "auto", {Mode.DIRECT: CHUNK, Mode.LOW_LATENCY: GRAPH}),
        ([], {"mode": "hybrid"}, Role.UNIFIED, "auto", {Mode.DIRECT: CHUNK, Mode.HYBRID: GRAPH}),
        ([], {"role": "prefill"}, Role.PREFILL, "normal", {Mode.DIRECT: CHUNK}),
        (["--deepep-mode", "normal"], {}, Role.UNIFIED, "normal", {Mode.DIRECT: CHUNK}),
        (["--deepep-mode", "low_latency"], {}, Role.UNIFIED, "low_latency", {Mode.LOW_LATENCY: CHUNK}),
        ([], {"gpus_per_node": 1}, Role.UNIFIED, "auto", {Mode.NORMAL: CHUNK, Mode.LOW_LATENCY: GRAPH}),
    ],
)
def test_role_and_mode_decide_the_family(resolve, settings, flags, content, role, deepep_mode, capacity):
    if content:
        settings(**content)
    args = resolve(*flags)
    plan = plan_of(args)
    assert (plan.role, args.resolved_dict()["deepep_mode"], plan.capacity) == (role, deepep_mode, capacity)


@pytest.mark.parametrize(
    ("content", "decode"), [({"role": "prefill"}, "disabled"), ({"mode": "direct"}, "full"), ({"mode": "auto"}, "full")]
)
def test_graphs_go_away_with_the_decode_family(resolve, settings, content, decode):
    settings(**content)
    args = resolve()
    assert graphs(args)[0] == decode
    assert plan_of(args).decode_graphs is (decode == "full")


def test_speculative_decoding_multiplies_the_tokens_of_a_request(resolve):
    plan = plan_of(resolve(*EAGLE))
    assert plan.capacity[Mode.LOW_LATENCY] % 4 == 0
    assert plan.tokens[Family.DECODE] == plan.capacity[Mode.LOW_LATENCY] > GRAPH // 4


@pytest.mark.parametrize(
    ("flags", "each"),
    [
        (["--speculative-eagle-topk", "8"], 8),  # rows that the draft tries side by side
        (["--speculative-eagle-topk", "8", "--speculative-moe-a2a-backend", "none"], 4),
        (["--enable-multi-layer-eagle"], 6),  # a draft of several layers looks back over its steps
    ],
)
def test_a_draft_takes_tokens_of_its_own(resolve, flags, each):
    bounds = ["--max-running-requests", "64", "--cuda-graph-max-bs-decode", "16"]
    assert plan_of(resolve(*EAGLE, *flags, *bounds)).tokens[Family.DECODE] == 16 * each


def test_chunks_that_grow_count_as_large_as_they_get(resolve):
    flags = ["--pp-size", "2", "--chunked-prefill-size", "4000", "--enable-dynamic-chunking", "--max-prefill-tokens"]
    assert plan_of(resolve(*flags, "900")).tokens[Family.PREFILL] == 1250
    assert plan_of(resolve(*flags, "2000")).tokens[Family.PREFILL] == 2000
    assert plan_of(resolve(*flags[2:4])).tokens[Family.PREFILL] == 1000


def test_tokens_of_an_attention_group_are_spread_over_its_ranks(resolve):
    plan = plan_of(resolve("--attn-dp-size", "2"))
    assert plan.tokens == {Family.PREFILL: 4096 // 2 // 2, Family.DECODE: GRAPH // 2}


def test_micro_batches_get_a_lane_each(resolve):
    assert plan_of(resolve("--enable-two-batch-overlap")).lanes == 2


def test_settings_can_forbid_fp8(resolve, settings):
    settings(fp8=False)
    assert resolve().resolved_dict()["deepep_dispatcher_output_dtype"] == "bf16"


DECODE = [*PD, "decode"]
LOW = {"max_tokens": {"low_latency": 128}}
REFUSED = [
    (
        [],
        {"rail": "put", "gpus_per_node": 2, "max_tokens": {"hybrid": 256}},
        r"rail put in the settings .* leaves hybrid alone, but this instance runs normal, too; serve prompts and",
    ),
    (
        [],
        LOW,
        r"decode graphs of 160 requests x 1 tokens a request make 160 tokens a rank, more than the capacity of 128; "
        r"lower --cuda-graph-max-bs-decode to 128, or raise max_tokens",
    ),
    (
        [*EAGLE, "--cuda-graph-max-bs-decode", "48", "--max-running-requests", "256"],
        LOW,
        r"decode graphs of 48 requests x 4 tokens a request make 192 tokens a rank.*lower --cuda-graph-max-bs-decode to 32",
    ),
    (
        ["--max-running-requests", "1024", "--cuda-graph-max-bs-decode", "64"],
        LOW,
        r"decode batches of 256 requests.*lower --max-running-requests to 512, or raise max_tokens.* to 256",
    ),
    (
        [],
        {"max_tokens": {"direct": 512}},
        r"max_tokens \(direct=512\) is less than the 1024 tokens.*raise max_tokens to 1024, or lower --chunked-prefill-size "
        r"to 2048",
    ),
    (
        ["--deepep-mode", "low_latency", "--cuda-graph-max-bs-decode", "64"],
        LOW,
        r"max_tokens \(low_latency=128\) is less than the 1024 tokens.*lower --chunked-prefill-size to 512",
    ),
    (["--chunked-prefill-size", "-1"], {}, r"--chunked-prefill-size -\d+ sets no limit.*give it a number of tokens"),
    (
        ["--attn-dp-size", "2", "--attn-cp-size", "2", "--moe-dp-size", "2"],
        {},
        r"--moe-data-parallel-size 2 splits .* leave it at 1",
    ),
    (["--device", "cpu", "--attn-dp-size", "2"], {}, r"--attn-dp-size 2 with --tp-size 4: on a CPU .* use --attn-dp-size 4"),
    ([], {"gpus_per_node": 3}, r"gpus_per_node=3 does not divide --tp-size 4; set gpus_per_node to a divisor"),
    (
        ["--pp-size", "2"],
        {"agent_port": 9000},
        r"--pp-size 2 makes an EP group of each stage.*\(agent_port=9000\).* use --pp-size 1, or remove agent_port",
    ),
    (["--elastic-ep-backend", "mooncake"], {}, r"--elastic-ep-backend mooncake resizes .* drop the flag"),
    (["--enable-single-batch-overlap"], {}, r"reads no signals of theirs \(on SM90 .*drop it, or use --enable-two-batch"),
    ([], {"layout": "masked"}, r"layout=masked is for vLLM; SGLang's layout follows from each batch: remove it"),
    (["--enable-two-batch-overlap"], {"lanes": 1}, r"lanes=1 leaves no room for --enable-two-batch-overlap.* set lanes to 2"),
    (
        ["--speculative-moe-a2a-backend", "deepep"],
        {},
        rf"--speculative-moe-a2a-backend deepep cannot run beside --moe-a2a-backend {NAME}.* use {NAME} or none",
    ),
    (["--deepep-config", "{}"], {}, r"--deepep-config '{}' tunes DeepEP, which does not run here; drop it"),
    (
        ["--deepep-dispatcher-output-dtype", "nvfp4"],
        {},
        r"--deepep-dispatcher-output-dtype nvfp4 must be one of auto, bf16, fp8: rows travel as bf16 or FP8; change the flag",
    ),
    (
        ["--deepep-dispatcher-output-dtype", "fp8"],
        {"fp8": False},
        r"--deepep-dispatcher-output-dtype fp8 must be one of auto, bf16: the settings say fp8=false; change the flag, or fp8",
    ),
    (["--dtype", "float16"], {}, r"--dtype float16 cannot be dispatched; use bfloat16"),
    (
        ["--tp-size", "64", "--attn-dp-size", "64", "--ep-num-redundant-experts", "48"],
        {},
        r"64 ranks; the kernels serve up to 32; choose a smaller EP size",
    ),
    (["--tp-size", "3", "--attn-dp-size", "3"], {}, r"num_experts=16 is not a multiple of the 3 ranks"),
    (
        DECODE,
        {"role": "prefill"},
        r"role prefill contradicts --disaggregation-mode decode; set role to decode, or change --disaggregation-mode",
    ),
    (DECODE, {"mode": "direct"}, r"mode direct does not serve role decode"),
    (
        ["--deepep-mode", "normal"],
        {"mode": "low_latency"},
        r"--deepep-mode normal contradicts role unified with mode low_latency.*leave --deepep-mode at auto",
    ),
    ([], {"mode": "sideways"}, r"(?s)EP_BACKEND_SETTINGS=.*sideways"),
]


@pytest.mark.parametrize(("flags", "content", "message"), REFUSED, ids=[r[2][:40] for r in REFUSED])
def test_what_cannot_work_is_refused_before_loading(resolve, settings, flags, content, message):
    if content:
        settings(**content)
    with pytest.raises(ValueError, match=message):
        resolve(*flags)


def test_a_draft_alone_cannot_use_the_backend(resolve):
    with pytest.raises(ValueError, match=f"--speculative-moe-a2a-backend {NAME} needs --moe-a2a-backend {NAME} too"):
        resolve("--speculative-moe-a2a-backend", NAME, backend="none")


def test_a_capacity_in_sglangs_own_variable_counts(resolve, monkeypatch):
    monkeypatch.setenv(CAPACITY_VARIABLE, "128")
    with pytest.raises(ValueError, match="more than the capacity of 128"):
        resolve()
    assert plan_of(resolve("--cuda-graph-max-bs-decode", "64")).capacity[Mode.LOW_LATENCY] == 128
    for value in ("lots", "0", "-1"):
        monkeypatch.setenv(CAPACITY_VARIABLE, value)
        with pytest.raises(ValueError, match=f"{CAPACITY_VARIABLE}='{value}' must be a number of tokens above 0; change it"):
            resolve()


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0"])
def test_an_unsupported_version_is_refused_only_with_our_backend(resolve, monkeypatch, version):
    monkeypatch.setattr(compat, "version", lambda: version)
    with pytest.raises(RuntimeError, match=rf"made for SGLang 0.5.17 to 0.5.24 .*this is {version}; .*{compat.OVERRIDE}=1"):
        resolve()
    assert resolve(backend="deepep").resolved_dict()["moe_a2a_backend"] == "deepep"
    monkeypatch.setenv(compat.OVERRIDE, "1")
    assert plan_of(resolve()).ranks == 4


def test_a_changed_interface_is_named(resolve, monkeypatch):
    import sglang.srt.layers.moe.token_dispatcher.deepep as deepep

    changed = deepep.DeepEPLLDispatchOutput.__mro__[1].__class__("Changed", (tuple,), {"_fields": ("hidden_states",)})
    monkeypatch.setattr(deepep, "DeepEPLLDispatchOutput", changed)
    with pytest.raises(RuntimeError, match=r"does not fit ep_backend: DeepEPLLDispatchOutput has the fields \('hidden_st"):
        resolve()


def test_an_sglang_that_has_no_place_for_the_hooks_is_refused(parse, resolve, monkeypatch):
    from sglang.srt.arg_groups import resolution_hooks

    def lacking():
        raise compat.Incompatible("SGLang 9 does not fit ep_backend: resolution has no steps")

    parse()
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    monkeypatch.setattr(compat, "require_resolution", lacking)
    monkeypatch.setattr(arguments, "_incompatible", None)
    arguments.install()
    with pytest.raises(RuntimeError, match="SGLang 9 does not fit ep_backend: resolution has no steps"):
        resolve()
    assert resolve(backend="none").resolved_dict()["moe_a2a_backend"] == "none"


def test_a_hook_that_sglang_did_not_apply_is_an_error(resolve, monkeypatch):
    """SGLang logs the failure of a hook and goes on without it."""
    monkeypatch.setattr(compat, "_hooked", {*compat._hooked, "sglang.srt.nowhere.nothing"})
    with pytest.raises(RuntimeError, match=r"not installed whole: SGLang did not hook sglang\.srt\.nowhere\.nothing"):
        resolve()


SCHEDULER = """
import pickle, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.moe import get_moe_a2a_backend, initialize_moe_config
from sglang.srt.runtime_context import SpawnRanks, publish
publish(pickle.load(open(sys.argv[1], "rb")), role="scheduler", ranks=SpawnRanks(world_rank=0))
initialize_moe_config()
print("backend", get_moe_a2a_backend().value)
"""


@pytest.mark.parametrize("plugins", [NAME, "another"])
def test_a_scheduler_that_did_not_load_the_plugin_ends(resolve, tmp_path, plugins):
    """What a scheduler does first, with arguments that its parent resolved with the plug-in."""
    file = tmp_path / "arguments"
    file.write_bytes(pickle.dumps(resolve("--deepep-mode", "low_latency")))
    ran = subprocess.run(
        [sys.executable, "-c", SCHEDULER, str(file)],
        env={**os.environ, "SGLANG_PLUGINS": plugins},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    if plugins == NAME:
        assert "backend deepep" in ran.stdout, ran.stderr
    else:
        assert ran.returncode == 1
        assert f"No MoeA2ABackend member for value {NAME}" in ran.stderr
