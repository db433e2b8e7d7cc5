"""The router's start script: of a prefill/decode pair, where its leaders are is in the environment."""

from ep_backend.deployment.render.role import FIRST_PORT, bootstrap_port
from ep_backend.deployment.render.text import array, script
from ep_backend.deployment.schema import Deployment

ROUTER = "router.sh"


def router_script(deployment: Deployment) -> str:
    router = deployment.router
    prefill, decode = f"http://$PREFILL:{FIRST_PORT['prefill']}", f"http://$DECODE:{FIRST_PORT['decode']}"
    common = [
        f'--host "${{LISTEN:-{router.host}}}" --port {router.port} --policy round_robin',
        # A retry would repeat a request whose engine has just died, and hide that.
        f"--disable-retries --worker-startup-timeout-secs {startup_s(deployment)}",
    ]
    if _engine(deployment) == "sglang":
        program = "python3 -m sglang_router.launch_router"
        words = ["--pd-disaggregation", f'--prefill "{prefill}" {bootstrap_port("prefill")}', f'--decode "{decode}"']
    else:
        program = "vllm-router"
        words = ["--vllm-pd-disaggregation --kv-connector nixl", f'--prefill "{prefill}"', f'--decode "{decode}"']
    return script(
        [
            f"# Before {deployment.name}'s prefill and decode: `PREFILL=HOST DECODE=HOST bash {ROUTER}`, with their leaders.",
            "# LISTEN: another address than router.host for clients.",
            "PREFILL=${PREFILL:?is the name or address of the prefill leader}",
            "DECODE=${DECODE:?is the name or address of the decode leader}",
            *array("arguments", [*common, *words]),
            f'exec {program} "${{arguments[@]}}"',
        ]
    )


def startup_s(deployment: Deployment) -> int:
    """How long an engine may take to load: weights, compilation and captured graphs took others up to 45 minutes (llm-d)."""
    return max(2700, round(deployment.target.start_timeout_s))


def _engine(deployment: Deployment) -> str:
    return next(role.engine for _, role in deployment.roles.items())
