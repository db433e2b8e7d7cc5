"""Findings of a file, and their three forms."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ep_backend.deployment.form import apart_from
from ep_backend.deployment.lint import lint
from ep_backend.deployment.lint.parser import check_with_engine
from ep_backend.deployment.lint.texts import rules
from ep_backend.deployment.load import read
from ep_backend.deployment.problems import DeploymentError, Finding


def findings_of(file: Path, with_engine: bool = False) -> list[Finding]:
    """Everything that is wrong with a file; only its form, where nothing else can be judged."""
    try:
        loaded, faults = read(file)
    except DeploymentError as error:
        return list(error.findings)
    found = lint(loaded.deployment)
    if with_engine:
        found += check_with_engine(loaded.deployment)
    return loaded.findings([*faults, *apart_from(faults, found)])


def is_error(finding: Finding) -> bool:
    return rules()[finding.problem.code].severity == "error"


def _text(findings: Sequence[Finding]) -> str:
    lines = []
    for finding in findings:
        rule = rules()[finding.problem.code]
        lines.append(f"{finding.file}:{finding.line}:{finding.column}: {rule.severity} {rule.code}: {finding.subject}")
        lines += [f"    why: {rule.why}", f"    fix: {finding.fix}"]
    errors = sum(map(is_error, findings))
    return "".join(f"{line}\n" for line in [*lines, f"{errors} error(s), {len(findings) - errors} warning(s)"])


def _json(findings: Sequence[Finding]) -> str:
    rows = [
        {
            "file": finding.file,
            "line": finding.line,
            "column": finding.column,
            "code": finding.problem.code,
            "severity": rules()[finding.problem.code].severity,
            "place": finding.name,
            "what": finding.problem.what,
            "why": rules()[finding.problem.code].why,
            "fix": finding.problem.fix,
        }
        for finding in findings
    ]
    return json.dumps(rows, indent=2) + "\n"


def _github(findings: Sequence[Finding]) -> str:
    """Workflow commands; https://docs.github.com/actions/reference/workflow-commands-for-github-actions."""
    return "".join(
        f"::{rules()[f.problem.code].severity} file={f.file},line={f.line},col={f.column},title={f.problem.code}::"
        f"{_escaped(f'{f.subject}; {f.fix}')}\n"
        for f in findings
    )


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


RENDER: dict[str, Callable[[Sequence[Finding]], str]] = {"text": _text, "json": _json, "github": _github}
