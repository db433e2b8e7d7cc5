"""In what the engines differ, where a name or a yes or no says it; what takes more is a function for each of them."""

from dataclasses import dataclass
from typing import Literal

Engine = Literal["vllm", "sglang"]


@dataclass(frozen=True)
class Traits:
    """Names of flags are without dashes."""

    title: str
    model_flag: str
    tensor_parallel_flag: str
    tensor_parallel_is_all: bool
    """Its tensor-parallel ranks are all ranks of the role, not those within a data-parallel one."""
    fraction_flag: str
    fraction: float
    """Of a GPU's memory that it takes where the flag is not given: vLLM's default; SGLang chooses by GPU, about this."""
    variables: str
    """What its environment variables begin with."""
    registers_variables: bool
    """Its table of variables has all that it reads."""
    overlap: Literal["dbo", "tbo"]
    both_families: bool
    """In a unified role its experts take each batch in its own format, a prompt's or decoding's; else one family's for good."""
    recaptures: bool
    """It can capture CUDA graphs anew while it runs."""
    one_data_parallel_rank: bool
    """Calls an all-to-all backend also with a single data-parallel rank."""
    cpu_pairs: bool
    """Moves KV blocks from prefill to decode without GPUs."""
    cpu_replicas: bool
    """False: it refuses replicas of experts without GPUs."""
    launches_share_a_machine: bool
    """False: several of one role would claim the same ports."""
    bootstraps: bool
    """Decode finds prefill at a port of prefill's, and both refuse a prompt that did not come by the pair's router."""


TRAITS: dict[Engine, Traits] = {
    "vllm": Traits(
        title="vLLM",
        model_flag="model",
        tensor_parallel_flag="tensor-parallel-size",
        tensor_parallel_is_all=False,
        fraction_flag="gpu-memory-utilization",
        fraction=0.92,
        variables="VLLM_",
        registers_variables=True,
        overlap="dbo",
        both_families=False,
        recaptures=True,
        one_data_parallel_rank=False,
        cpu_pairs=True,
        cpu_replicas=False,
        launches_share_a_machine=True,
        bootstraps=False,
    ),
    "sglang": Traits(
        title="SGLang",
        model_flag="model-path",
        tensor_parallel_flag="tp-size",
        tensor_parallel_is_all=True,
        fraction_flag="mem-fraction-static",
        fraction=0.85,
        variables="SGLANG_",
        registers_variables=False,
        overlap="tbo",
        both_families=True,
        recaptures=False,
        one_data_parallel_rank=True,
        cpu_pairs=False,
        cpu_replicas=True,
        launches_share_a_machine=False,
        bootstraps=True,
    ),
}
FRACTION_FLAGS = tuple(traits.fraction_flag for traits in TRAITS.values())
