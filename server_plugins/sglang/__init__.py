"""SGLang's side of ep_backend: `sglang serve --model-path MODEL --moe-a2a-backend ep_backend`.

SGLang calls :func:`register` in each of its processes, whatever their backend. It only makes the flag's value known and
resolves it; what reaches into the MoE layers is installed later, in schedulers whose backend it is.
"""

NAME = "ep_backend"
_registered = False


def register() -> None:
    """Entry point of the group sglang.srt.plugins. Idempotent.

    SGLang logs what a plug-in raises and goes on. So this raises nothing that matters later: a process without these hooks
    meets a backend that it does not know, and ends there.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from server_plugins.sglang import arguments

    arguments.install()
