"""The flag in vLLM's parser and configuration, its refusals, and that other backends notice nothing."""

import json
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM")

from ep_backend.checkpoint import write_checkpoint
from ep_backend.modes import Family, Layout, Mode
from ep_backend.policy import Role
from ep_backend.settings import SETTINGS_VARIABLE, Settings
from server_plugins.vllm import NAME, choice, compat, hooks

pytestmark = pytest.mark.engine

OTHERS = ["allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "nixl_ep"]
ENGINE_LIMIT = 2048  # tokens that vLLM allows itself in one batch here


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hooks") / "checkpoint"
    write_checkpoint(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)


@pytest.fixture
def make(checkpoint):
    """A VllmConfig as `vllm serve` would make it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    def config(backend=NAME, **flags):
        usual = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True}
        parallel = {"data_parallel_size": 2, "enable_expert_parallel": True, "all2all_backend": backend}
        return EngineArgs(model=checkpoint, **{**usual, **parallel, **flags}).create_engine_config()

    return config


@pytest.fixture
def settings(tmp_path, monkeypatch):
    def write(**content):
        path = tmp_path / "settings.json"
        path.write_text(json.dumps(content))
        monkeypatch.setenv(SETTINGS_VARIABLE, str(path))

    return write


def transfer(role):
    return {"kv_connector": "ExampleConnector", "kv_role": role}


def test_the_command_line_knows_the_flag(make):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(["--all2all-backend", NAME]).all2all_backend == NAME
    with pytest.raises(SystemExit):
        parser.parse_args(["--all2all-backend", "no_such_backend"])


def test_the_name_survives_configuration_and_pickling(make):
    config = make()
    assert config.parallel_config.all2all_backend == NAME
    assert pickle.loads(pickle.dumps(config)).parallel_config.all2all_backend == NAME


def test_micro_batches_are_accepted(make):
    config = make(ubatch_size=2)
    assert config.parallel_config.use_ubatching
    assert choice.choose(config).lanes == 2
    assert choice.choose(make()).lanes == 1


@pytest.mark.parametrize(
    ("kv_role", "role", "family"),
    [
        (None, Role.UNIFIED, Family.PREFILL),
        ("kv_both", Role.UNIFIED, Family.PREFILL),
        ("kv_producer", Role.PREFILL, Family.PREFILL),
        ("kv_consumer", Role.DECODE, Family.DECODE),
    ],
)
def test_without_settings_the_role_is_kv_role(make, kv_role, role, family):
    made = choice.choose(make(**({"kv_transfer_config": transfer(kv_role)} if kv_role else {})))
    assert (made.role, made.family) == (role, family)


def test_settings_choose_the_family_of_a_unified_instance(make, settings):
    settings(mode="low_latency")
    made = choice.choose(make(kv_transfer_config=transfer("kv_both")))
    assert made.family is Family.DECODE
    assert made.capacity(64, 4, 1) == {Mode.LOW_LATENCY: 64}


def test_on_a_cpu_decoding_has_masked_rows_unless_compact_ones_are_asked_for(make, settings):
    made = choice.choose(make())
    assert (made.layout, made.alias, made.formats) == (Layout.COMPACT, *["deepep_high_throughput"] * 2)
    settings(mode="low_latency")
    made = choice.choose(make())
    assert (made.layout, made.alias, made.formats) == (Layout.MASKED, *["deepep_low_latency"] * 2)
    settings(mode="low_latency", layout="compact")
    made = choice.choose(make())
    assert (made.layout, made.alias, made.formats) == (Layout.COMPACT, "deepep_low_latency", "deepep_high_throughput")


@pytest.mark.parametrize(("mode", "layout"), [("low_latency", "masked"), ("low_latency", "compact"), ("direct", None)])
def test_graphs_are_allowed_by_the_family_not_by_the_layout(make, settings, monkeypatch, mode, layout):
    from vllm.config import CompilationConfig

    seen = []
    original = CompilationConfig.set_splitting_ops_for_v1
    monkeypatch.setattr(
        CompilationConfig,
        "set_splitting_ops_for_v1",
        lambda self, all2all_backend, *rest, **more: (
            seen.append(all2all_backend),
            original(self, all2all_backend, *rest, **more),
        )[1],
    )
    settings(mode=mode, **({"layout": layout} if layout else {}))
    make()
    assert seen == ["deepep_high_throughput" if mode == "direct" else "deepep_low_latency"]


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, Layout.MASKED),
        ({"moe_backend": "deep_gemm"}, Layout.MASKED),
        ({"quantization": None, "checkpoint": None}, Layout.COMPACT),
        ({"quantization": "mxfp4", "checkpoint": {"quant_method": "mxfp4"}}, Layout.COMPACT),
        ({"checkpoint": {"quant_method": "fp8"}}, Layout.COMPACT),
        ({"checkpoint": {**BLOCKS, "weight_block_size": [64, 128]}}, Layout.COMPACT),
        ({"checkpoint": None}, Layout.COMPACT),
        ({"moe_backend": "triton"}, Layout.COMPACT),
        ({"deep_gemm": False}, Layout.COMPACT),
        ({"environment": "0"}, Layout.COMPACT),
    ],
)
def test_on_a_gpu_rows_are_masked_for_deep_gemm_alone(monkeypatch, changes, layout):
    import vllm.utils.deep_gemm as deep_gemm

    given = {
        "quantization": "fp8",
        "checkpoint": BLOCKS,
        "moe_backend": "auto",
        "deep_gemm": True,
        "environment": "1",
        **changes,
    }
    monkeypatch.setattr(choice, "fabric", lambda: "nvshmem")
    monkeypatch.setattr(deep_gemm, "is_deep_gemm_supported", lambda: given["deep_gemm"])
    monkeypatch.setenv("VLLM_MOE_USE_DEEP_GEMM", given["environment"])
    arch = SimpleNamespace(quantization_config=given["checkpoint"])
    config = SimpleNamespace(
        model_config=SimpleNamespace(quantization=given["quantization"], model_arch_config=arch),
        kernel_config=SimpleNamespace(moe_backend=given["moe_backend"]),
    )
    assert choice._layout(Settings(), Family.DECODE, config) is layout
    assert choice._layout(Settings(), Family.PREFILL, config) is Layout.COMPACT
    for asked in Layout:
        assert choice._layout(Settings(layout=asked), Family.DECODE, config) is asked


def test_a_real_configuration_has_what_the_choice_of_the_layout_reads(make):
    config = make()
    assert config.model_config.quantization is None and config.model_config.model_arch_config.quantization_config is None
    assert config.kernel_config.moe_backend == "auto"
    assert not choice._has_masked_products(config)


@pytest.mark.parametrize("kv_role", ["kv_producer", "kv_consumer"])
def test_decode_instances_get_small_batches_by_default(make, kv_role):
    from vllm.engine.arg_utils import EngineArgs

    seen = []
    original = EngineArgs._set_default_max_num_seqs_and_batched_tokens_args
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            EngineArgs,
            "_set_default_max_num_seqs_and_batched_tokens_args",
            lambda self, *rest: (original(self, *rest), seen.append(rest[-1].use_batched_dp_moe)),
        )
        make(kv_transfer_config=transfer(kv_role))
    assert seen == [kv_role == "kv_consumer"]


def test_capacities_come_from_settings_or_from_the_engines_limit(make, settings):
    config = make()
    assert config.scheduler_config.max_num_batched_tokens == ENGINE_LIMIT
    assert choice.choose(config).capacity(ENGINE_LIMIT, 4, 1) == {Mode.DIRECT: ENGINE_LIMIT}
    settings(max_tokens={"normal": 4096, "direct": 64, "low_latency": 64})
    assert choice.choose(make()).capacity(ENGINE_LIMIT, 4, 1) == {Mode.NORMAL: 4096, Mode.DIRECT: 64}


REFUSED = [
    ({"enable_expert_parallel": False}, {}, "needs expert parallelism; add --enable-expert-parallel"),
    ({"data_parallel_size": 1}, {}, "needs --data-parallel-size above 1"),
    ({"data_parallel_size": 1, "tensor_parallel_size": 2}, {}, "--tensor-parallel-size 2 alone replicates the tokens"),
    ({"data_parallel_size": 3}, {}, "num_experts=16 is not a multiple of the 3 ranks"),
    ({"enable_lora": True}, {}, "does not serve LoRA adapters; remove --enable-lora"),
    ({"dtype": "float16"}, {}, "--dtype float16 cannot be dispatched; use bfloat16 or float32"),
    (
        {},
        {"layout": "masked"},
        "layout masked is for the decode family's modes; remove it, or set mode to low_latency or hybrid",
    ),
    ({}, {"mode": "hybrid", "layout": "rows"}, '(?s)EP_BACKEND_SETTINGS=.*layout: "rows"'),
    ({"ubatch_size": 3}, {}, "--ubatch-size 3 exceeds the 2 micro-batches"),
    ({"ubatch_size": 2}, {"lanes": 1}, "lanes=1 leaves no room for --enable-dbo's second micro-batch; set lanes to 2"),
    ({}, {"mode": "sideways"}, "(?s)EP_BACKEND_SETTINGS=.*sideways"),
    (
        {},
        {"role": "decode", "mode": "direct"},
        "mode direct does not serve role decode; use low_latency, hybrid or auto",
    ),
    ({}, {"gpus_per_node": 3}, "gpus_per_node=3 does not divide the 2 ranks"),
    (
        {"pipeline_parallel_size": 2},
        {"agent_port": 9000},
        r"--pipeline-parallel-size 2 makes an EP group of each stage.*\(agent_port=9000\).* use 1, or remove agent_port",
    ),
    (
        {},
        {"mode": "direct", "max_tokens": {"direct": 64}},
        "less than the 2048 tokens .* raise max_tokens to 2048, or lower --max-num-batched-tokens to 64",
    ),
    ({}, {"mode": "hybrid", "max_tokens": {"hybrid": 2048, "low_latency": 4096}}, "give one number"),
    (
        {"kv_transfer_config": transfer("kv_producer")},
        {"role": "decode"},
        "role decode contradicts kv_role kv_producer; set role to prefill, or change --kv-transfer-config",
    ),
    (
        {"kv_transfer_config": transfer("kv_consumer")},
        {"mode": "direct"},
        "mode direct does not serve role decode",
    ),
]


@pytest.mark.parametrize(("flags", "content", "message"), REFUSED, ids=[r[2][:40] for r in REFUSED])
def test_what_cannot_work_is_refused_before_loading(make, settings, flags, content, message):
    if content:
        settings(**content)
    with pytest.raises(ValueError, match=message):
        make(**flags)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_by_puts_a_buffer_is_made_for_hybrid_alone(make, settings, role):
    settings(rail="put", gpus_per_node=1, max_tokens={"hybrid": ENGINE_LIMIT})
    made = choice.choose(make(kv_transfer_config=transfer(role)))
    arguments = made.buffer_arguments(256, 8, 4, made.capacity(ENGINE_LIMIT, 4, 2), ("fp32",))
    assert (arguments["rail"], arguments["max_tokens"]) == ("put", {"hybrid": ENGINE_LIMIT})


def test_more_ranks_than_the_kernels_serve_are_refused_before_loading(make, monkeypatch):
    monkeypatch.setattr(choice, "fabric", lambda: "nvshmem")
    with pytest.raises(ValueError, match="64 ranks; the kernels serve up to 32; choose a smaller EP size"):
        make(dtype="bfloat16", data_parallel_size=64, hf_overrides={"n_routed_experts": 64})


def test_elastic_ep_is_refused(make):
    config = make()
    config.parallel_config.enable_elastic_ep = True
    with pytest.raises(ValueError, match="remove --enable-elastic-ep"):
        choice.choose(config)


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0"])
def test_an_unsupported_version_is_refused_only_with_our_backend(make, monkeypatch, version):
    monkeypatch.setattr("vllm.__version__", version)
    with pytest.raises(RuntimeError, match=rf"made for vLLM 0.26 to 0.34 .*this is {version}; .*{compat.OVERRIDE}=1"):
        make()
    assert make("allgather_reducescatter").parallel_config.all2all_backend == "allgather_reducescatter"
    monkeypatch.setenv(compat.OVERRIDE, "1")
    assert make().parallel_config.all2all_backend == NAME


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.1rc1"])
def test_supported_versions(monkeypatch, version):
    monkeypatch.setattr("vllm.__version__", version)
    compat.require_version()


def test_a_changed_interface_is_named(monkeypatch):
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk

    compat.require_config_hooks()
    compat.require_moe_hooks()
    monkeypatch.setattr(mk.FusedMoEPrepareAndFinalizeModular, "finalize", lambda self, output: None)
    with pytest.raises(RuntimeError, match=r"does not fit ep_backend: <lambda> takes \['output'\]"):
        compat.require_moe_hooks()


# Registers the plug-in or not, then prints what users of other backends could see of it.
PROBE = """
import json, sys, time
import vllm.config.parallel as parallel, vllm.plugins
from vllm.engine.arg_utils import EngineArgs
if sys.argv[2] == "with":
    started = time.perf_counter()
    from server_plugins.vllm import register
    register()
    register()
    assert time.perf_counter() - started < 2, time.perf_counter() - started
vllm.plugins.plugins_loaded = True
loaded = [name for name in sys.modules if name.startswith("vllm.model_executor.layers.fused_moe")]
found = {"fused_moe loaded": loaded}
for backend in sys.argv[3:]:
    config = EngineArgs(
        model=sys.argv[1], dtype="float32", max_model_len=256, enforce_eager=True, data_parallel_size=2,
        enable_expert_parallel=True, all2all_backend=backend,
    ).create_engine_config()
    p = config.parallel_config
    found[backend] = [
        p.all2all_backend, p.use_batched_dp_moe, p.use_sequence_parallel_moe, p.use_all2all, p.compute_hash(),
        str(config.compilation_config.cudagraph_mode), config.scheduler_config.max_num_batched_tokens,
    ]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_other_backends_are_as_without_the_plug_in(checkpoint):
    def probe(how):
        command = [sys.executable, "-c", PROBE, checkpoint, how, *OTHERS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    assert probe("with") == probe("without")


def test_registering_never_raises(monkeypatch, caplog):
    import server_plugins.vllm as plugin

    def fail():
        raise RuntimeError("ParallelConfig has changed")

    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(hooks, "install_config", fail)
    plugin.register()


class TestMoeHooks:
    """The patches of a worker, undone afterwards."""

    @pytest.fixture
    def moe(self, monkeypatch):
        """Installs them for a manager of the layout; returns what vLLM asks about a backend."""
        import vllm.model_executor.layers.fused_moe.all2all_utils as utils
        import vllm.model_executor.layers.fused_moe.config as config
        import vllm.model_executor.layers.fused_moe.modular_kernel as mk
        import vllm.model_executor.layers.fused_moe.oracle.unquantized as oracle
        from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

        parallel = config.FusedMoEParallelConfig
        kept = [
            (parallel, "use_batched_activation_format"),
            (parallel, "needs_round_robin_routing_tables"),
            (mk.FusedMoEExperts, "is_supported_config"),
            (SharedExperts, "_disable_shared_experts_overlap"),
            (oracle, "backend_to_kernel_cls"),
            (utils, "maybe_roundup_layer_hidden_size"),
            (utils, "maybe_make_prepare_finalize"),
            (oracle, "maybe_make_prepare_finalize"),
        ]
        for owner, name in kept:
            monkeypatch.setattr(owner, name, vars(owner)[name])
        monkeypatch.setattr(hooks, "_moe_installed", False)

        def install(layout):
            batched = layout is Layout.MASKED
            formats = "deepep_low_latency" if batched else "deepep_high_throughput"
            hooks.install_moe(SimpleNamespace(batched=batched, choice=SimpleNamespace(formats=formats)))
            return utils, oracle, mk, SharedExperts

        return install

    @staticmethod
    def parallel(backend, **changes):
        from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

        sizes = dict.fromkeys(("tp_size", "pcp_size", "sp_size"), 1) | {"dp_size": 2, "ep_size": 2}
        ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
        rest = {"use_ep": True, "all2all_backend": backend, "enable_eplb": False, **changes}
        return FusedMoEParallelConfig(**sizes, **ranks, **rest)

    @pytest.mark.parametrize("layout", Layout)
    def test_formats(self, moe, layout):
        moe(layout)
        ours = self.parallel(NAME)
        assert ours.use_batched_activation_format is (layout is Layout.MASKED)
        assert ours.needs_round_robin_routing_tables
        assert not self.parallel("allgather_reducescatter").use_batched_activation_format
        assert self.parallel("deepep_low_latency").use_batched_activation_format
        assert not self.parallel(NAME, use_ep=False).needs_round_robin_routing_tables

    def test_every_module_that_holds_the_factory_gets_ours(self, moe):
        utils, oracle, _, _ = moe(Layout.COMPACT)
        assert oracle.maybe_make_prepare_finalize is utils.maybe_make_prepare_finalize

    def test_monolithic_experts_are_refused(self, moe):
        utils, *_ = moe(Layout.COMPACT)
        layer = SimpleNamespace(moe_parallel_config=self.parallel(NAME), moe_backend="flashinfer_trtllm")
        with pytest.raises(RuntimeError, match="--moe-backend flashinfer_trtllm chose experts that route on their own"):
            utils.maybe_make_prepare_finalize(layer, None, use_monolithic=True)

    def test_experts_judge_ours_by_its_formats(self, moe):
        from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp8

        moe(Layout.COMPACT)
        seen = []

        class Probe(CutlassExpertsFp8):
            _supports_current_device = staticmethod(lambda: True)
            _supports_activation = staticmethod(lambda activation: True)
            _supports_quant_scheme = staticmethod(lambda weight, activation: True)

            @staticmethod
            def _supports_parallel_config(parallel):
                seen.append(parallel.all2all_backend)
                return CutlassExpertsFp8._supports_parallel_config(parallel)

        layer = SimpleNamespace(moe_parallel_config=self.parallel(NAME), is_act_and_mul=True, activation=None)
        ok, reason = Probe.is_supported_config(Probe, layer, None, None, None)
        assert not ok and "parallel config" in reason
        assert seen == ["deepep_high_throughput"]
        assert layer.moe_parallel_config.all2all_backend == NAME

    def test_hidden_sizes_become_whole_vectors(self, moe):
        utils, *_ = moe(Layout.COMPACT)
        assert utils.maybe_roundup_layer_hidden_size(2884, None, self.parallel(NAME)) == 2888
        assert utils.maybe_roundup_layer_hidden_size(7168, None, self.parallel(NAME)) == 7168
        assert utils.maybe_roundup_layer_hidden_size(2884, None, self.parallel("allgather_reducescatter")) == 2884

    def test_shared_experts_overlap_with_eplb(self, moe):
        *_, shared = moe(Layout.COMPACT)

        def disabled(backend):
            experts = shared.__new__(shared)
            experts._moe_config = SimpleNamespace(moe_parallel_config=self.parallel(backend, enable_eplb=True))
            experts._layer = SimpleNamespace()
            return experts._disable_shared_experts_overlap

        assert not disabled(NAME)
        assert disabled("deepep_high_throughput")

    def test_a_cpu_has_experts_for_masked_rows(self, moe):
        from server_plugins.vllm.cpu_experts import CPUBatchedExperts

        _, oracle, mk, _ = moe(Layout.MASKED)
        assert oracle.backend_to_kernel_cls(oracle.UnquantizedMoeBackend.CPU)[-1] is CPUBatchedExperts
        assert CPUBatchedExperts.activation_format() == mk.FusedMoEActivationFormat.BatchedExperts


@pytest.mark.parametrize(("own", "within", "behind"), [(None, 20, None), (12, 12, 12), (40, 20, 40)])
def test_the_limit_of_sms_of_a_step_of_micro_batches_ends_with_it(monkeypatch, own, within, behind):
    import server_plugins.vllm.manager as adapter

    monkeypatch.setattr(adapter, "_multiprocessors", lambda: 132)
    manager = adapter.EpManager.__new__(adapter.EpManager)
    manager.choice = SimpleNamespace(settings=Settings(sms=own))
    seen = []
    for limit in (20, 132, 20):  # as SMControlContextManager gives them on entering and leaving
        manager.set_num_sms(limit)
        seen.append(manager.sms)
    assert seen == [within, behind, within]
