"""The batch of an engine whose flag is not given: by the GPU's memory, and the same for lint, plan and what is started."""

import pytest

from ep_backend.deployment.batches import batch_limit, tokens_a_sequence
from ep_backend.deployment.flags import engine_flags
from ep_backend.deployment.schema import Deployment, Role, RoleName


def deployment(engine: str, topology: dict[str, object], mode: str = "auto", **args: object) -> Deployment:
    role = {"engine": engine, "data_parallel": 8, "ep": {"mode": mode}, "args": args}
    document = {"name": "x", "topology": topology, "model": {"preset": "deepseek-v3"}}
    return Deployment.model_validate(document | {"roles": {"prefill": role, "decode": role, "unified": role}})


def limit(made: Deployment, name: RoleName) -> int:
    return batch_limit(made, name, dict(made.roles.items())[name])


@pytest.mark.parametrize(
    ("topology", "vllm", "sglang"),
    [
        ({"preset": "h100-nvl8-cx7"}, 8192, 1024),
        ({"preset": "h200-nvl8-cx7"}, 8192, 1024),
        ({"preset": "b200-nvl8"}, 16384, 2048),
        ({"preset": "gb200-nvl72"}, 16384, 2048),
        ({"hbm": "48GiB"}, 2048, 512),
        ({"hbm": "80GiB", "gpu": "A100"}, 2048, 1024),
        ({}, 8192, 1024),
    ],
)
def test_the_default_is_that_of_the_gpu(topology: dict[str, object], vllm: int, sglang: int) -> None:
    assert limit(deployment("vllm", topology), "prefill") == vllm
    assert limit(deployment("sglang", topology), "prefill") == sglang


def test_the_decode_family_of_vllm_has_a_default_of_its_own() -> None:
    b200 = {"preset": "b200-nvl8"}
    assert limit(deployment("vllm", b200), "decode") == 256
    assert limit(deployment("vllm", b200), "unified") == 16384
    assert limit(deployment("vllm", b200, "low_latency"), "unified") == 256
    assert limit(deployment("vllm", b200, "direct"), "unified") == 16384


def test_what_else_decides_it() -> None:
    def vllm(**args: object) -> int:
        return limit(deployment("vllm", {"preset": "h200-nvl8-cx7"}, **args), "decode")

    assert vllm(**{"max-num-batched-tokens": 128}) == 128
    assert vllm(**{"max-num-seqs": 512}) == 512
    assert vllm(**{"performance-mode": "throughput"}) == 512
    assert vllm(**{"max-model-len": 4096}) == 256
    assert vllm(**{"max-model-len": 4096, "enable-chunked-prefill": False}) == 4096


def test_decode_of_sglang_is_bounded_by_requests_and_graphs() -> None:
    def sglang(**args: object) -> int:
        return limit(deployment("sglang", {"preset": "h200-nvl8-cx7"}, **args), "decode")

    assert sglang() == 512
    assert sglang(**{"max-running-requests": 1024, "chunked-prefill-size": 65536}) == 128
    assert sglang(**{"max-running-requests": 1024, "cuda-graph-max-bs-decode": 160}) == 160
    assert sglang(**{"max-running-requests": "1024", "cuda-graph-max-bs-decode": "160"}) == 160
    assert sglang(**{"max-running-requests": 1024, "cuda-graph-bs-decode": ["128", "160"]}) == 160


@pytest.mark.parametrize(
    ("engine", "name", "flag", "value"),
    [
        ("vllm", "prefill", "max-num-batched-tokens", 8192),
        ("vllm", "decode", "max-num-batched-tokens", 256),
        ("sglang", "prefill", "chunked-prefill-size", 8192),
        ("sglang", "decode", "chunked-prefill-size", None),
    ],
)
def test_the_engine_is_told_the_number_that_its_buffer_is_made_for(
    engine: str, name: str, flag: str, value: int | None
) -> None:
    made = deployment(engine, {})
    found = {each: engine_flags(made, each, role).get(flag) for each, role in made.roles.items()}
    assert found[name] == value  # type: ignore[index]


@pytest.mark.parametrize(
    ("args", "balancer"),
    [
        ({}, {"num_redundant_experts": 8}),
        ({"eplb-config": {"window_size": 100}}, {"num_redundant_experts": 8, "window_size": 100}),
        ({"eplb-config.num_redundant_experts": 8}, {"num_redundant_experts": 8}),
    ],
)
def test_vllm_makes_the_replicas_that_the_file_counts(args: dict[str, object], balancer: dict[str, object]) -> None:
    made = deployment("vllm", {}, **args)
    role = made.roles.decode
    assert role is not None and "enable-eplb" not in engine_flags(made, "decode", role)
    more = role.model_copy(update={"ep": role.ep.model_copy(update={"redundant_experts": 8})})
    found = engine_flags(made, "decode", more)
    assert found["enable-eplb"] is True and found["eplb-config"] == balancer


@pytest.mark.parametrize(
    "args",
    [
        {"speculative-config": {"method": "mtp", "num_speculative_tokens": 2}},
        {"speculative_config": '{"method": "mtp", "num-speculative-tokens": "2"}'},
        {"speculative-config.num_speculative_tokens": 2},
        {"spec-method": "mtp", "spec-tokens": 2},
    ],
)
def test_drafts_are_counted_however_vllm_is_told(args: dict[str, object]) -> None:
    assert tokens_a_sequence(Role.model_validate({"data_parallel": 8, "args": args})) == 3
    assert tokens_a_sequence(Role(data_parallel=8)) == 1


@pytest.mark.parametrize(
    ("more", "each"),
    [
        ({}, 4),
        ({"speculative-eagle-topk": 8}, 8),
        ({"speculative-eagle-topk": 8, "speculative-moe-a2a-backend": "none"}, 4),
        ({"enable-multi-layer-eagle": True}, 6),
    ],
)
def test_sglangs_draft_takes_tokens_of_its_own(more: dict[str, object], each: int) -> None:
    args = {"speculative-num-draft-tokens": 4, "speculative-num-steps": 3, "speculative-eagle-topk": 1, **more}
    role = Role.model_validate({"engine": "sglang", "data_parallel": 8, "args": args})
    assert tokens_a_sequence(role) == each
