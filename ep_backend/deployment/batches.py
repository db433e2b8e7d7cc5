"""What the engines' flags say about the tokens that a rank handles in one step."""

from ep_backend.deployment.schema import Deployment, Role

# vLLM's limit of tokens in one step where the flag is not given.
DEFAULT_BATCH = 2048


def batch_limit(deployment: Deployment, role: Role) -> int:
    """The most tokens that one rank of the engine handles in a step."""
    if role.engine == "sglang":
        # SGLang divides a chunk over its attention data-parallel ranks.
        chunk = (role.number("chunked-prefill-size") or DEFAULT_BATCH * role.data_parallel) // role.data_parallel
        running = (role.number("max-running-requests") or 0) // role.data_parallel
        return max(chunk, running * tokens_a_sequence(role))
    if deployment.topology.device == "cpu":
        # Without chunked prefill, which MLA lacks there, vLLM overrules the flag to fit any prompt.
        return max(DEFAULT_BATCH, role.number("max-model-len") or 0)
    return role.number("max-num-batched-tokens") or DEFAULT_BATCH


def tokens_a_sequence(role: Role) -> int:
    """Tokens that one running sequence dispatches in a decode step: more than one with speculative decoding."""
    if drafts := role.number("speculative-num-draft-tokens"):
        return drafts
    speculative = role.arg("speculative-config")
    given = speculative.get("num_speculative_tokens") if isinstance(speculative, dict) else None
    return 1 + given if isinstance(given, int) else 1


def eager(role: Role) -> bool:
    """Does the role decode without captured graphs?"""
    disabled = role.arg("cuda-graph-backend-decode") == "disabled" or role.arg("disable-cuda-graph")
    return bool(disabled if role.engine == "sglang" else role.arg("enforce-eager"))


def capacity(deployment: Deployment, role: Role) -> int:
    """Rows a rank may dispatch: what the file says, or the batch limit, as `up` takes it."""
    return role.ep.max_tokens or batch_limit(deployment, role)
