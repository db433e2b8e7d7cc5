"""A plan as tables for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ep_backend.plan.model import GIB
from ep_backend.plan.result import MemoryPlan, ModePlan, Plan, RolePlan


def print_plan(plan: Plan, console: Console) -> None:
    """The machines and the model, then for every role its modes, memory and assumptions."""
    nic = f"{plan.nic_gbs:.0f} GB/s NIC" if plan.nic_gbs else "no NIC"
    machine = f"{plan.gpu or 'GPU'}, {plan.nvlink_gbs:.0f} GB/s NVLink, {nic}"
    if plan.device == "cpu":
        machine = f"CPU, ranks share memory; times as if they were GPUs with {plan.nvlink_gbs:.0f} GB/s NVLink"
    console.print(f"{plan.name}: {machine}", highlight=False)
    console.print(
        f"model: hidden {plan.hidden}, {plan.experts} experts, top {plan.top_k}, {plan.moe_layers} MoE layers, "
        f"{plan.parameters / 1e9:.3g} G parameters",
        highlight=False,
    )
    for name, role in plan.roles.items():
        _print_role(name, role, plan.device, console)


def _print_role(name: str, role: RolePlan, device: str, console: Console) -> None:
    domains, ranks = ("node(s)", "ranks") if device == "cpu" else ("NVLink domain(s)", "GPUs")
    sent = ("off-node MB", "in-node MB") if device == "cpu" else ("NIC MB", "NVLink MB")
    console.print()
    table = Table(
        title=f"{name}: {role.engine}, EP{role.ranks} over {role.nodes} {domains}, {role.tokens} tokens a rank, "
        f"{role.payload}; a token reaches {role.gpus_per_token:.2f} {ranks} on {role.nodes_per_token:.2f} domains",
        title_justify="left",
    )
    for column in ("mode", "copies", *sent, "dispatch us", "combine us", "step ms", "SMs", "buffer"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode, numbers in role.modes.items():
        style = "bold" if mode == role.mode else "" if mode in role.buffer_modes else "dim"
        table.add_row(mode + (" *" if mode == role.mode else ""), *_cells(numbers), style=style)
    console.print(table)
    how = "auto picks it" if role.mode == role.auto else f"auto would pick {role.auto}"
    console.print(f"* {role.mode}: {how}: {role.auto_reason}", highlight=False)
    console.print(f"  flips without a restart: {', '.join(role.buffer_modes)}", highlight=False)
    regions = ", ".join(f"{region} {_size(size)}" for region, size in role.buffer["lanes"][0].items() if size)
    console.print(
        f"  buffer: {_size(role.buffer['total'])} a rank: control {_size(role.buffer['control'])}, "
        f"{len(role.buffer['lanes'])} lane(s) of {regions}",
        highlight=False,
    )
    if role.memory is not None:
        _print_memory(name, role.memory, role.buffer["total"], console)
    for line in role.assumptions:
        console.print(f"  assumes {line}", style="dim", highlight=False)


def _cells(m: ModePlan) -> list[str]:
    return [
        f"{m.copies:.2f}",
        f"{m.nic_bytes / 1e6:.2f}",
        f"{m.nvlink_bytes / 1e6:.2f}",
        _band(m.dispatch_us, m.dispatch_us_low, m.dispatch_us_high),
        _band(m.combine_us, m.combine_us_low, m.combine_us_high),
        _band(m.step_ms, m.step_ms_low, m.step_ms_high),
        "-" if m.sms is None else str(m.sms),
        _size(m.buffer_bytes) + ("" if m.fits is not False else " (too large)"),
    ]


def _print_memory(name: str, memory: MemoryPlan, buffer_bytes: int, console: Console) -> None:
    console.print(
        f"  memory a rank: {_size(memory.hbm)} x {memory.fraction:.2f} = weights {_size(memory.weights)} + buffer "
        f"{_size(buffer_bytes)} + reserve {_size(memory.reserve)} + KV {_size(memory.kv)} "
        f"({memory.kv_tokens} tokens)",
        highlight=False,
    )
    console.print(
        f"  fits: KV memory for {memory.sequences} full-length sequences a rank{_batch(name, memory)}; "
        f"above max_tokens {memory.largest_max_tokens} none is left",
        highlight=False,
    )


def _batch(name: str, memory: MemoryPlan) -> str:
    """How many of the sequences that fit one decode step can dispatch."""
    if name == "prefill":
        return ""
    if memory.dispatched >= memory.sequences:
        return ", and one step can dispatch them all"
    return (
        f", of which max_tokens lets one step dispatch {memory.dispatched}; raised so that one step dispatches all, "
        f"the larger buffer leaves KV memory for {memory.largest_batch}"
    )


def _band(value: float, low: float, high: float) -> str:
    digits = 0 if value >= 100 else 1
    return f"{value:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def _size(size: float) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"
