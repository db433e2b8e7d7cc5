"""The report for people, and as JSON; docs/doctor.md lists the keys."""

import json
from itertools import groupby

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ep_backend.doctor.result import Report, Row, Status

STYLES: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
WORDS = ("passed", "warned", "failed", "skipped")


def as_json(report: Report) -> str:
    rows = [
        {
            "id": row.texts.id,
            "group": row.texts.group,
            "title": row.texts.title,
            "status": row.status,
            "evidence": row.evidence,
            "fix": row.fix,
            "why": row.texts.why,
            "source": row.texts.source,
        }
        for row in report.rows
    ]
    return json.dumps(
        {"for": report.title, "counts": {status: report.count(status) for status in STYLES}, "checks": rows}, indent=2
    )


def print_report(report: Report, console: Console, verbose: bool) -> None:
    """Without `verbose`, checks that do not concern the need are counted, not listed."""
    console.print(escape(report.title), highlight=False)
    table = Table("", "check", "what was read", box=box.SIMPLE, show_header=False, pad_edge=False)
    for group, rows in groupby(report.rows, key=lambda row: row.texts.group):
        shown = [row for row in rows if verbose or row.status != "skip"]
        if shown:
            table.add_row("", f"[bold]{group}[/bold]", "")
        for row in shown:
            table.add_row(*_cells(row))
    console.print(table)
    counts = ", ".join(f"{report.count(status)} {word}" for status, word in zip(STYLES, WORDS, strict=True))
    hint = "" if verbose or not report.count("skip") else " (--all lists those skipped)"
    console.print(f"{counts}{hint}", highlight=False)


def _cells(row: Row) -> tuple[str, str, str]:
    text = escape(row.evidence)
    if row.fix:
        text += f"\n[dim]{escape(row.texts.why)}[/dim]\nfix: {escape(row.fix)}"
    style = STYLES[row.status]
    return f"[{style}]{row.status}[/{style}]", escape(row.texts.title), text
