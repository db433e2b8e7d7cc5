"""The table of default batches says what this vLLM does."""

import pytest

pytest.importorskip("vllm", reason="the table is compared with vLLM's own")

from ep_backend.deployment.batches import DEFAULT_BATCHES, VLLM_DECODE_BATCH

pytestmark = pytest.mark.engine
GIB = 1 << 30


def test_the_defaults_are_those_of_vllm(monkeypatch):
    from vllm.config import SchedulerConfig
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    for least, tokens in DEFAULT_BATCHES["vllm"]:
        platform = type(
            "Gpu",
            (),
            {
                "get_device_total_memory": lambda least=least: least * GIB,
                "get_device_name": lambda: "NVIDIA H200",
                "is_tpu": lambda: False,
                "is_cpu": lambda: False,
            },
        )
        monkeypatch.setattr(arg_utils, "current_platform", platform)
        batches, _ = arg_utils.EngineArgs.get_batch_defaults(1)
        assert batches[UsageContext.OPENAI_API_SERVER] == tokens, least
    assert SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP == VLLM_DECODE_BATCH
