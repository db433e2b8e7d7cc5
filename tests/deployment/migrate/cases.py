"""The public setups that migrate is tried on: inputs that make one deployment, and options that a person would add."""

from pathlib import Path
from typing import NamedTuple

INPUTS = Path(__file__).parent / "inputs"


class Case(NamedTuple):
    inputs: tuple[str, ...]
    options: dict[str, str]
    roles: dict[str, tuple[int, int, str, int]]
    """nodes, data_parallel, mode and max_tokens of each role that must come out."""

    @property
    def texts(self) -> list[tuple[str, str]]:
        return [(name, (INPUTS / name).read_text()) for name in self.inputs]


CASES = {
    "sglang-h100": Case(
        ("sglang-h100-prefill.sh", "sglang-h100-decode.sh"),
        {"topology": "h100-nvl8-cx7"},
        {"prefill": (4, 32, "normal", 256), "decode": (4, 32, "low_latency", 128)},
    ),
    "sglang-6017": Case(
        ("sglang-6017-prefill.sh", "sglang-6017-decode.sh"),
        {},
        {"prefill": (4, 32, "normal", 16384), "decode": (9, 72, "low_latency", 256)},
    ),
    "sglang-gb200": Case(
        ("sglang-gb200-prefill.sh", "sglang-gb200-decode.sh"),
        {"topology": "gb200-nvl72"},
        {"prefill": (2, 8, "auto", 2048), "decode": (12, 48, "low_latency", 768)},
    ),
    "sglang-rbg": Case(
        ("sglang-rbg-decode.sh", "sglang-rbg-prefill.sh"),
        {"model": "deepseek-v3"},
        {"prefill": (1, 8, "normal", 16384), "decode": (1, 8, "low_latency", 32)},
    ),
    "vllm-two-nodes": Case(("vllm-two-nodes.sh",), {}, {"unified": (2, 16, "low_latency", 256)}),
    "vllm-dep16": Case(
        ("vllm-dep16-prefill.sh", "vllm-dep16-decode.sh"),
        {},
        {"prefill": (2, 16, "normal", 8192), "decode": (2, 16, "low_latency", 512)},
    ),
    "sglang-lws": Case(
        ("sglang-lws-prefill.yaml", "sglang-lws-decode.yaml"),
        {},
        {"prefill": (2, 16, "normal", 16384), "decode": (2, 16, "auto", 128)},
    ),
    "vllm-disaggregatedset": Case(
        ("vllm-disaggregatedset.yaml",), {}, {"prefill": (2, 16, "auto", 8192), "decode": (2, 16, "low_latency", 256)}
    ),
}
