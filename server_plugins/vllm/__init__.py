"""vLLM's side of ep_backend: `vllm serve MODEL --all2all-backend ep_backend`.

vLLM calls :func:`register` in each of its processes, for every model and backend. It only makes the flag's value known;
what reaches into the MoE layers is installed later, in workers whose expert-parallel group uses it.
"""

import logging

NAME = "ep_backend"
_registered = False


def register() -> None:
    """Entry point of the group vllm.general_plugins. Idempotent, cheap, and raises nothing: all users of vLLM run it."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        from server_plugins.vllm import hooks

        hooks.install_config()
    except Exception as e:
        logging.getLogger("vllm.ep_backend").warning("--all2all-backend %s is not available: %s", NAME, e)
