"""`ep-backend modes`: the mode table and the policy table, as the code reads them."""

import json
from dataclasses import asdict
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(modes)


def modes(
    as_json: Annotated[bool, typer.Option("--json", help="both tables as JSON; docs/json.md lists the keys")] = False,
) -> None:
    """Show the four modes and what `auto` picks when."""
    from ep_backend.modes import MODES
    from ep_backend.policy import POLICY

    if as_json:
        tables = {
            "modes": {mode.value: asdict(spec) for mode, spec in MODES.items()},
            "policy": [asdict(row) for row in POLICY],
        }
        print(json.dumps(tables, indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("mode", "family", "layout", "records in", "hops", "graph", "hook", box=box.SIMPLE)
    words = Table("mode", "arrival", "credit", box=box.SIMPLE)
    for mode, spec in MODES.items():
        table.add_row(
            *(mode.value, spec.family.value, spec.layout.value, spec.placement.value, "2" if spec.two_hops else "1"),
            *("yes" if spec.graph else "no", "yes" if spec.hook else "no"),
        )
        words.add_row(mode.value, spec.arrival, spec.credit)
    console.print(table, words)
    table = Table("family", "topology", "auto picks", "only if faster", "because", box=box.SIMPLE)
    for row in POLICY:
        faster = row.faster.value if row.faster else ""
        table.add_row(row.family.value, row.topology.value, row.mode.value, faster, row.reason)
    console.print(table)
    console.print("The first row whose mode has slots for the batch (and can be captured, under capture) decides.")
    console.print("The layout is what a mode returns unless the other is asked for; hybrid serves prefill across nodes too.")
