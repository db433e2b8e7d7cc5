"""Every mistake in tests/deployment/broken is found at the line that its comment marks, and nothing else is."""

import re
from pathlib import Path

import pytest

from ep_backend.deployment.lint.report import findings_of
from ep_backend.deployment.lint.texts import rules

BROKEN = sorted((Path(__file__).parent / "broken").glob("*.yaml"))
DEPLOY = Path(__file__).parents[2] / "deploy"
# Rules that look at this machine, or at an installed engine; their tests are below and in test_lint_host.py.
OF_THE_MACHINE = {"EP005", "EP013", "EP014", "EP015", "EP016", "EP306", "EP407", "EP409"}


def marked(file: Path) -> set[tuple[int, str]]:
    """(line, code) of the comments."""
    lines = enumerate(file.read_text().splitlines(), 1)
    return {(number, code) for number, line in lines for code in re.findall(r"EP\d{3}", line.partition("#")[2])}


@pytest.mark.parametrize("file", BROKEN, ids=lambda file: file.stem)
def test_the_mistake_is_found_where_it_is(file: Path) -> None:
    found = findings_of(file)
    assert {(finding.line, finding.problem.code) for finding in found} == marked(file), [str(f) for f in found]
    assert marked(file)


def test_every_rule_has_a_broken_file() -> None:
    assert len(BROKEN) >= 30
    assert {code for file in BROKEN for _, code in marked(file)} | OF_THE_MACHINE == set(rules())


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_deployments_have_no_finding_but_a_checkpoint_not_yet_written(file: Path) -> None:
    codes = {finding.problem.code for finding in findings_of(file)}
    assert codes <= ({"EP011"} if file.stem.startswith(("local-cpu", "h200")) else set())
