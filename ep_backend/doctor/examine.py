"""Runs the checks that a need calls for, each bounded in time, none able to end the command."""

import threading
from pathlib import Path

from ep_backend.deployment.form import apart_from
from ep_backend.deployment.lint import check
from ep_backend.deployment.load import read
from ep_backend.deployment.schema import RoleName
from ep_backend.doctor.checks import CHECKS, Probe
from ep_backend.doctor.host import Host, Unknown
from ep_backend.doctor.need import WITHOUT, Need, of_deployment, of_host
from ep_backend.doctor.result import Report, Row, Verdict, fail, skip, texts

# A command has its own limit, below this; a file of a wedged driver has none.
CHECK_S = 30.0


def examine(host: Host, file: Path | None, role: RoleName | None, check_s: float = CHECK_S) -> Report:
    """The host against what a role of a file needs; without a file, against what its hardware is for.

    Raises DeploymentError if the file cannot be read, ValueError if it has no such role.
    """
    if file is None:
        if role is not None:
            raise ValueError(f"--role {role} needs the file that describes the role: add -f FILE")
        need = of_host(host)
    else:
        loaded, faults = read(file)
        errors = loaded.findings([*faults, *apart_from(faults, check(loaded.deployment))])
        need = of_deployment(loaded.deployment, role, tuple(map(str, errors)))
    return Report(need.title, tuple(row(name, probe, host, need, check_s) for name, probe in CHECKS.items()))


def row(name: str, probe: Probe, host: Host, need: Need, check_s: float) -> Row:
    about = texts()[name]
    missing = next((word for word in about.needs if word not in need.words), None)
    verdict = skip(WITHOUT[missing]) if missing else _bounded(probe, host, need, check_s)
    fix = (verdict.fix or about.fix) if verdict.status in ("warn", "fail") else ""
    return Row(about, verdict.status, verdict.evidence, fix)


def _bounded(probe: Probe, host: Host, need: Need, check_s: float) -> Verdict:
    answer: list[Verdict] = []

    def ask() -> None:
        try:
            answer.append(probe(host, need))
        except Unknown as error:
            answer.append(skip(str(error)))
        except Exception as error:
            # A report with a hole tells more than none.
            answer.append(skip(f"not understood: {type(error).__name__}: {error}"))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(check_s)
    return answer[0] if answer else fail(f"no answer in {check_s:g} s", "look at `dmesg`: a driver or a file system hangs")
