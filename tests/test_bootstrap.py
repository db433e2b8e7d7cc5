"""`ep` and the environments beside it: who may build them, when, and what is said if that cannot be."""

import fcntl
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """#!/bin/sh
echo "$@"
[ "$1" != diff ] || grep -q good "$2" || { echo "bad file" >&2; exit 1; }
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What `ep` itself needs of the repository."""
    for name in ("ep", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def environment(checkout: Path, name: str = "VLLM_ENVIRONMENT") -> Any:
    return runpy.run_path(str(checkout / "ep"))[name]


def complete(checkout: Path) -> Any:
    """An environment in name only, whose `ep-backend` prints its arguments and knows good files from bad ones."""
    made = environment(checkout)
    made.python.parent.mkdir(parents=True)
    for file, text in ((made.python, "#!/bin/sh\n"), (made.python.with_name("ep-backend"), PROGRAM)):
        file.write_text(text)
        file.chmod(0o755)
    (made.folder / "ep-stamp").write_text(f"{made._engine()}\n{made._package()}\n")
    return made


def ep(checkout: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(checkout / "ep"), *words]
    env = {name: value for name, value in os.environ.items() if name != "EP_SGLANG_PYTHON"} | {"PIP_NO_INDEX": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    said, complained = process.communicate(timeout=60)
    return process.returncode, said, complained


def test_an_environment_that_another_python_made_is_used(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = complete(checkout)
    monkeypatch.setattr(sys, "version", "3.14.0 (main)")
    assert made.complete()
    assert outcome(ep(checkout, "modes", "--json")) == (0, "modes --json\n", "")


@pytest.mark.parametrize("change", ["python gone", "python fails", "other parts", "moved"])
def test_one_that_is_broken_or_of_other_parts_is_not(change: str, checkout: Path) -> None:
    made = complete(checkout)
    if change == "python gone":
        made.python.unlink()
    elif change == "python fails":
        made.python.write_text("#!/bin/sh\nexit 1\n")
    elif change == "other parts":
        made._parts.append("more==1")
    else:
        shutil.copytree(checkout, checkout / "copy")
        made = environment(checkout / "copy")
    assert not made.complete()


def test_the_wait_for_another_is_bounded(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = environment(checkout)
    monkeypatch.setitem(type(made).ensure.__globals__, "WAIT_S", 0.1)
    with (checkout / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(4321, end="", file=lock, flush=True)
        with pytest.raises(SystemExit, match=r"process 4321 has not made .*/\.venv within 0\.1 s: end it, then try again"):
            made.ensure()


def test_whoever_comes_second_waits_and_builds_nothing(checkout: Path) -> None:
    with (checkout / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(4711, end="", file=lock, flush=True)
        second = ep(checkout, "modes")
        assert second.stdout is not None
        assert second.stdout.readline() == f"ep: waiting for process 4711, which makes {checkout}/.venv\n"
        complete(checkout)
    assert outcome(second) == (0, "modes\n", "")


def test_one_in_use_is_not_built_anew(checkout: Path) -> None:
    made = complete(checkout)
    shutil.copy(shutil.which("sleep") or "", made.python.with_name("serve"))
    with subprocess.Popen([made.python.with_name("serve"), "60"]) as user:
        (made.folder / "ep-stamp").write_text("older\n")
        code, said, complained = outcome(ep(checkout, "modes"))
        user.kill()
    assert (code, said) == (1, "") and complained.count("\n") == 1
    assert f"{made.folder} must be built anew" in complained and f"in use by process {user.pid}: end that" in complained
    assert made.python.exists()


def test_an_interrupted_build_is_one_line(checkout: Path) -> None:
    building = ep(checkout, "modes")
    assert building.stdout is not None and "building" in building.stdout.readline()
    os.killpg(building.pid, signal.SIGINT)
    assert outcome(building) == (130, "", "ep: interrupted\n")


def test_a_place_that_cannot_be_written_is_one_line(checkout: Path) -> None:
    (checkout / ".venv.lock").mkdir()
    code, said, complained = outcome(ep(checkout, "modes"))
    assert (code, said) == (1, "") and complained.count("\n") == 1
    assert complained.startswith(f"ep: {checkout}/.venv cannot be made: [Errno 21] Is a directory")
    assert "in a folder that you can write to" in complained


def test_a_file_is_checked_before_sglang_is_installed(checkout: Path) -> None:
    complete(checkout)
    (checkout / ".venv-sglang.lock").mkdir()
    file = checkout / "file.yaml"
    file.write_text("engine: sglang # bad\n")
    assert outcome(ep(checkout, "up", str(file), "--detach")) == (1, "", "bad file\n")
    file.write_text("engine: sglang # good\n")
    code, said, complained = outcome(ep(checkout, "up", str(file), "--detach"))
    assert (code, said) == (1, "") and ".venv-sglang cannot be made" in complained


@pytest.mark.parametrize("comment", ["# engine: sglang", "roles: {} # not {engine: sglang}", "  #engine: sglang"])
def test_what_a_comment_names_is_not_built(checkout: Path, comment: str) -> None:
    complete(checkout)
    (checkout / ".venv-sglang.lock").mkdir()
    file = checkout / "file.yaml"
    file.write_text(f"name: x\n{comment}\n# good\n")
    assert outcome(ep(checkout, "up", str(file))) == (0, f"up {file}\n", "")


def test_words_that_no_file_can_have_as_name_are_left_to_the_program(checkout: Path) -> None:
    complete(checkout)
    assert outcome(ep(checkout, "up", "a" * 300)) == (0, f"up {'a' * 300}\n", "")
