"""Step time of every mode over the batch size, as a picture. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path

from ep_backend.deployment.schema import Deployment
from ep_backend.plan.planner import plan

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def plot(deployment: Deployment, file: Path) -> None:
    """Writes one panel a role: milliseconds a step against tokens a rank, with each mode's band."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'ep-backend[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    roles = [name for name, _ in deployment.roles.items()]
    figure, axes = pyplot.subplots(1, len(roles), figsize=(6 * len(roles), 4.5), squeeze=False)
    for name, axis in zip(roles, axes[0], strict=True):
        configured = plan(deployment).roles[name].tokens
        batches = sorted({batch for batch in BATCHES if batch <= 2 * configured} | {configured})
        steps = [plan(_with_tokens(deployment, name, batch)).roles[name].modes for batch in batches]
        for mode in steps[0]:
            lines = axis.plot(batches, [step[mode].step_ms for step in steps], marker=".", label=mode)
            axis.fill_between(
                batches,
                [step[mode].step_ms_low for step in steps],
                [step[mode].step_ms_high for step in steps],
                alpha=0.12,
                color=lines[0].get_color(),
            )
        axis.axvline(configured, linestyle=":", color="gray")
        axis.set(xscale="log", yscale="log", xlabel="tokens a rank", ylabel="all-to-all, ms a step", title=name)
        axis.legend()
    figure.suptitle(f"{deployment.name}: model, not measurement; bands as calibrated")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _with_tokens(deployment: Deployment, name: str, tokens: int) -> Deployment:
    role = getattr(deployment.roles, name)
    smaller = role.model_copy(update={"ep": role.ep.model_copy(update={"max_tokens": tokens})})
    return deployment.model_copy(update={"roles": deployment.roles.model_copy(update={name: smaller})})
