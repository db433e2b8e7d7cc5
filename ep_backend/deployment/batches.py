"""What the engines' flags say about the tokens that a rank handles in one step."""

from pydantic import JsonValue

from ep_backend.deployment.engines.traits import Engine
from ep_backend.deployment.resolve import topology
from ep_backend.deployment.schema import Deployment, Role, RoleName, whole_number
from ep_backend.modes import MODES, Family, Mode
from ep_backend.plan.model import GIB

# Where nothing tells what a GPU has: as an H100. `engine_flags` names the batch that follows, so that the engine has it too.
ASSUMED_HBM = 80 * GIB
# Limits of tokens in a step where the flag is not given, by the least GiB of a GPU. vLLM 0.26 to 0.33:
# EngineArgs.get_batch_defaults of an API server; SGLang 0.5.17 to 0.5.23: handle_gpu_memory_settings, of all attention ranks.
DEFAULT_BATCHES: dict[Engine, tuple[tuple[int, int], ...]] = {
    "vllm": ((160, 16384), (70, 8192), (0, 2048)),
    "sglang": ((160, 16384), (60, 8192), (20, 4096), (0, 2048)),
}
# vLLM's for an all-to-all with masked rows, which the plug-in takes for the decode family in either layout
# (SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP).
VLLM_DECODE_BATCH = 256
CPU_BATCH = 2048
# The largest decode batch that SGLang captures where no flag bounds it, on the largest GPUs.
SGLANG_GRAPHS = 512


def batch_limit(deployment: Deployment, name: RoleName, role: Role) -> int:
    """The most tokens that one rank of the engine handles in a step."""
    if role.engine == "vllm":
        return _vllm_batch(deployment, name, role)
    prompts = chunk(deployment, role) if name != "decode" else 0
    each, sequences = tokens_a_sequence(role), (role.number("max-running-requests") or 0) // role.data_parallel
    bound = max(sequences * each, largest_bucket(role)[1])
    return max(prompts, bound or (SGLANG_GRAPHS * each if name != "prefill" else 0))


def chunk(deployment: Deployment, role: Role) -> int:
    """Tokens of prompts in one step of a rank of SGLang, which divides a chunk over its attention data-parallel ranks."""
    given = role.number("chunked-prefill-size")
    if given is None and deployment.topology.device == "cpu":
        return CPU_BATCH
    return (given or _default_batch(deployment, role)) // role.data_parallel


def _vllm_batch(deployment: Deployment, name: RoleName, role: Role) -> int:
    prompt = role.number("max-model-len") or 0
    if deployment.topology.device == "cpu":
        # Without chunked prefill, which MLA lacks there, vLLM overrules the flag to fit any prompt.
        return max(CPU_BATCH, prompt)
    if given := role.number("max-num-batched-tokens"):
        return given
    unified = name == "unified" and role.ep.mode != "auto"
    family = MODES[Mode(role.ep.mode)].family if unified else Family.DECODE if name == "decode" else Family.PREFILL
    default = VLLM_DECODE_BATCH if family is Family.DECODE else _default_batch(deployment, role)
    if role.arg("performance-mode") == "throughput":
        default *= 2
    # vLLM refuses a limit below that of its sequences.
    return max(default, role.number("max-num-seqs") or 0, prompt if whole_prompts(role) else 0)


def whole_prompts(role: Role) -> bool:
    """Was vLLM told not to cut prompts into chunks?"""
    return role.arg("enable-chunked-prefill") is False or bool(role.arg("no-enable-chunked-prefill"))


def _default_batch(deployment: Deployment, role: Role) -> int:
    machine = topology(deployment.topology)
    gib = (machine.hbm or ASSUMED_HBM) / GIB
    if role.engine == "vllm" and "a100" in (machine.gpu or "").lower():
        gib = 0
    return next(tokens for least, tokens in DEFAULT_BATCHES[role.engine] if gib >= least)


def tokens_a_sequence(role: Role) -> int:
    """Tokens that one running sequence dispatches in a decode step: more than one with speculative decoding."""
    if drafts := role.number("speculative-num-draft-tokens"):
        if role.arg("speculative-moe-a2a-backend") == "none":
            return drafts
        steps, several = role.number("speculative-num-steps"), bool(role.arg("enable-multi-layer-eagle"))
        return max(drafts, draft_rows(role.number("speculative-eagle-topk"), steps, several))
    speculative = role.arg("speculative-config")
    held = {key.replace("-", "_"): value for key, value in speculative.items()} if isinstance(speculative, dict) else {}
    return 1 + (whole_number(held.get("num_speculative_tokens")) or role.number("spec-tokens") or 0)


def draft_rows(eagle_topk: int | None, steps: int | None, several_layers: bool) -> int:
    """Tokens of one sequence in a step of SGLang's draft model: its guesses side by side, and the window that a draft of
    several layers looks back over."""
    return max(eagle_topk or 1, 2 * (steps or 0) if several_layers else 0)


def largest_bucket(role: Role) -> tuple[str, int]:
    """The flag and the tokens of the largest decode batch that is captured; 0 if the file does not say."""
    if role.engine == "sglang":
        for flag in ("cuda-graph-max-bs-decode", "cuda-graph-bs-decode", "cuda-graph-max-bs", "cuda-graph-bs"):
            if largest := _largest(role.arg(flag)):
                return flag, largest * tokens_a_sequence(role)
        return "", 0
    compilation = role.arg("compilation-config")
    nested = compilation if isinstance(compilation, dict) else {}
    for flag in ("max-cudagraph-capture-size", "cudagraph-capture-sizes"):
        if largest := _largest(role.arg(flag) or nested.get(flag.replace("-", "_"))):
            return flag, largest
    return "", 0


def _largest(value: JsonValue) -> int:
    numbers = map(whole_number, value if isinstance(value, list) else [value])
    return max((n for n in numbers if n is not None), default=0)


def eager(role: Role) -> bool:
    """Does the role decode without captured graphs?"""
    disabled = role.arg("cuda-graph-backend-decode") == "disabled" or role.arg("disable-cuda-graph")
    return bool(disabled if role.engine == "sglang" else role.arg("enforce-eager"))


def capacity(deployment: Deployment, name: RoleName, role: Role) -> int:
    """Rows a rank may dispatch: what the file says, or the batch limit, as `up` takes it."""
    return role.ep.max_tokens or batch_limit(deployment, name, role)
