"""The bench on a machine without a GPU: checks, predicted bytes, failures that end neither the run nor the others, results."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ep_backend.bench import cli, origin, reading, results, worker
from ep_backend.bench.suites import SUITES, TINY, Case
from ep_backend.bench.targets import LIMITS, RATIOS
from tests.core.pool import World


def of_rank(world: World) -> worker.Rank:
    return worker.Rank(world.rank, world.size, world.device, world.fabric)


def measured(world: World) -> list[dict[str, Any]]:
    me = of_rank(world)
    cases = [c for c in TINY if not c.hindrance(me.size)]
    buffers = worker.Buffers(me, cases)
    lines = [worker.measure(me, case, buffers, 2, profiled=False) for case in cases]
    buffers.close()
    return lines


@pytest.mark.parametrize("size", [2, 4])
def test_every_mode_is_checked_and_sends_what_is_predicted(ranks: Any, fabric: str, size: int) -> None:
    for lines in ranks(size, fabric).run(measured, timeout=120):
        assert [line["name"] for line in lines] == [c.name for c in TINY if not c.hindrance(size)]
        for line in lines:
            for op in ("dispatch", "combine"):
                found = line[op]
                assert 0 < found["p50_us"] <= found["p99_us"] <= found["max_us"]
                assert found["bytes_as_predicted"] and 0 < found["remote_bytes"] <= found["busiest_port_bytes"]
                assert bool(found["scale_out_bytes"]) == (line["nodes"] > 1)
                assert ("blocks" in found) == (fabric != "host")
            if fabric == "host":
                continue
            sent, summed = line["dispatch"]["blocks"], line["combine"]["blocks"]
            assert all(count > 0 for each in (*sent.values(), *summed.values()) for count in each)
            kernels = {"low_latency": ("dispatch", "sums"), "direct": ("dispatch", "combine")}.get(line["mode"])
            if kernels:
                assert (list(sent), list(summed)) == ([kernels[0]], [kernels[1]])
            if line["mode"] == "normal":
                assert list(sent)[:2] == ["ring_count", "ring_dispatch"] and list(summed) == ["ring_combine"]


class Breaking(worker.Workload):
    """Goes wrong on rank 1: before a dispatch, or in one token of combine's result."""

    how = ""

    def dispatch(self) -> None:
        if self.me.rank == 1 and self.how == "raise":
            raise RuntimeError("no more dispatches")
        super().dispatch()

    def combine(self) -> None:
        super().combine()
        if self.me.rank == 1 and self.how == "one token":
            self.out[3] *= 1.02


def broken(world: World, how: str) -> tuple[str, list[float]]:
    """What the failed case said, and another case's medians after it."""
    me, case, after = of_rank(world), TINY[0], TINY[1]
    buffers = worker.Buffers(me, [case, after])
    proper, worker.Workload, Breaking.how = worker.Workload, Breaking, how  # type: ignore[misc]
    timeout, worker.TIMEOUT_S = worker.TIMEOUT_S, 1.0
    try:
        worker.measure(me, case, buffers, 2, profiled=False)
        said = ""
    except worker.CaseFailed as error:
        said = str(error)
    finally:
        worker.Workload, worker.TIMEOUT_S = proper, timeout  # type: ignore[misc]
    buffers.drop(case)
    line = worker.measure(me, after, buffers, 2, profiled=False)
    buffers.close()
    return said, [line[op]["p50_us"] for op in ("dispatch", "combine")]


@pytest.mark.parametrize(("how", "reason"), [("raise", "no more dispatches"), ("one token", "token 3 is off by 0.02")])
def test_a_case_fails_on_all_ranks_and_the_next_one_runs(ranks: Any, how: str, reason: str) -> None:
    for said, after in ranks(2, "host").run(broken, how):
        assert "rank 1: " in said and reason in said
        assert min(after) > 0


@pytest.mark.slow
def test_a_run_records_a_failure_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "tiny", [TINY[0], Case("odd", "direct", "compact", 8, hidden=100), TINY[2]])
    out = tmp_path / "lines.jsonl"
    arguments = ["--fabric", "host", "--suite", "tiny", "--rounds", "3", "--ranks", "2", "--commit", "c0ffee"]
    done = CliRunner().invoke(cli.app, [*arguments, "--output", str(out)])
    assert done.exit_code == 1, done.output
    first, odd, last = (json.loads(x) for x in out.read_text().splitlines())
    assert "hidden=100" in odd["error"]
    for line in (first, last):
        assert line["ranks"] == 2 and line["rounds"] == 3 and line["input_hash"] and line["commit"] == "c0ffee"
        assert line["torch"] and line["command"].startswith("ep-backend bench") and line["time"]


@pytest.mark.slow
def test_a_clock_that_is_set_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by NTP, a day later at every look here."""
    monkeypatch.setattr(time, "time", itertools.count(time.time(), 86_400.0).__next__)
    options = {"fabric": "host", "rounds": 1, "profile": False, "facts": {}}
    lines, _ = cli.run(1, options, TINY[:1], 100.0)
    assert [line["name"] for line in lines] == [TINY[0].name]


@pytest.mark.slow
def test_ranks_that_cannot_even_begin_are_not_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = {"fabric": "nvshmem", "rounds": 1, "profile": False, "facts": {}}
    with pytest.raises(typer.Exit) as ended:
        cli.run(1, options, TINY[:2], 100.0)
    assert ended.value.exit_code == 1
    found = capsys.readouterr()
    assert not found.out and found.err.count("ep-backend: no case can begin: the ranks ended with status 1: ") == 1


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_no_rank(tmp_path: Path) -> None:
    arguments = ["--fabric", "host", "--suite", "tiny", "--rounds", "1000000", "--ranks", "2", "--commit", tmp_path.name]
    run = subprocess.Popen([sys.executable, "-m", "ep_backend.bench.cli", *arguments], stderr=subprocess.DEVNULL)

    def ranks_of_it() -> int:
        count = 0
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = file.read_bytes().decode(errors="replace").split("\0")
                count += (
                    "ep_backend.bench.worker" in words and "torch.distributed.run" not in words and tmp_path.name in words[-2]
                )
        return count

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + 60
        while ranks_of_it() != count:
            assert time.monotonic() < deadline, f"{ranks_of_it()} ranks run, not {count}"
            time.sleep(0.2)

    try:
        wait_for(2)
        time.sleep(5.0)  # so that they are past their imports
        run.terminate()
        assert run.wait(60) == 128 + signal.SIGTERM
        wait_for(0)
    finally:
        run.kill()


def test_no_case_begins_when_the_time_is_up() -> None:
    assert cli.run(2, {"facts": {}}, TINY, -1.0) == ([], "no time was left for")


def refused(arguments: list[str], status: int = 2) -> str:
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == status and isinstance(done.exception, SystemExit), done.output
    return " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (["--suite", "nope"], ["--suite nope: there is no such suite; choose tiny, decode"]),
        (["--only", "decode-3, decode-1"], ["--only decode-3: not in suite all; it has decode-128"]),
        (["--fabric", "nope"], ["--fabric nope: there is no such fabric; choose nvshmem or host"]),
        (["--ranks", "0"], ["--ranks 0: give at least 1"]),
        (["--ranks", "-1"], ["--ranks -1: give at least 1"]),
        (["--rounds", "0"], ["--rounds 0: give at least 1"]),
        (["--sms", "0"], ["--sms 0: give at least 1"]),
        (["--seconds", "nan"], ["--seconds nan: give at least 1"]),
        (["--fabric", "host", "--ranks", "7"], ["--ranks 7: no case runs, because 256 experts do not divide by 7 ranks"]),
        (
            ["--fabric", "host", "--ranks", "1", "--suite", "two-hops"],
            ["--ranks 1: no case runs, because 1 ranks do not divide by 2 nodes"],
        ),
        (
            ["--fabric", "host", "--output", "/proc/no/x.jsonl"],
            ["--output /proc/no/x.jsonl: it cannot be written (No such file or directory)"],
        ),
        (["--fabric", "host", "--output", "/"], ["--output /: it cannot be written (Is a directory)"]),
    ],
)
def test_a_wrong_option_is_refused_at_once(arguments: list[str], reasons: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "run", None)
    said = refused(arguments)
    assert all(reason in said for reason in reasons), said


def test_a_chart_that_cannot_be_drawn_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "run", None)
    found: list[object | None] = [None]
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: found[0])
    assert "charts need matplotlib; install ep-backend[plot]" in refused(["--plot", "x.png"])
    found[0] = object()
    assert "choose .png, .svg, .pdf" in refused(["--plot", "x.jpg.txt"])
    assert "--plot /proc/no/x.png: it cannot be written" in refused(["--fabric", "host", "--plot", "/proc/no/x.png"])


def test_the_kernels_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "run", None)
    monkeypatch.setattr(cli, "_gpus", lambda: 0)
    assert refused([]) == "ep-backend: --fabric nvshmem: there is no CUDA device here; use --fabric host"


def tiny(monkeypatch: pytest.MonkeyPatch, *lines: dict[str, Any], stopped: str, arguments: tuple[str, ...] = ()) -> Any:
    """What the command makes of a run that gave these lines."""
    asked: list[str] = []

    def run(ranks: int, options: Any, cases: list[Case], *others: Any) -> Any:
        asked.extend(c.name for c in cases)
        return list(lines), stopped

    monkeypatch.setattr(cli, "run", run)
    done = CliRunner().invoke(cli.app, ["--fabric", "host", "--suite", "tiny", "--ranks", "2", *arguments])
    return done, asked


def test_a_run_that_measures_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    done, _ = tiny(monkeypatch, stopped="no time was left for", arguments=("--seconds", "1"))
    assert done.exit_code == 1
    assert "no time was left for tiny-decode-128" in done.output
    assert "ep-backend: --seconds 1: nothing was measured before they were over; give more" in done.output


def test_names_may_have_blanks_and_a_case_that_does_not_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {"name": TINY[0].name, "ranks": 1, "error": "no"}
    names = f"{TINY[0].name}, {TINY[3].name} ,"
    done, asked = tiny(monkeypatch, failed, stopped="no time", arguments=("--only", names, "--ranks", "1"))
    assert asked == [TINY[0].name] and done.exit_code == 1
    assert f"left out, because 1 ranks do not divide by 2 nodes: {TINY[3].name}" in done.output
    assert "no time" not in done.output


def test_starts_that_are_used_up_are_not_called_lack_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(ranks: int, options: dict[str, Any], file: Path, log: Path, *others: Any) -> str:
        file.write_text("\n")
        log.write_text("a word")
        return "the ranks ended with status 1"

    monkeypatch.setattr(cli, "STARTS", 2)
    monkeypatch.setattr(cli, "_start", start)
    lines, stopped = cli.run(2, {"facts": {}}, TINY, 100.0)
    assert [line["name"] for line in lines] == [c.name for c in TINY[:2]]
    assert all(line["error"] == "the ranks ended with status 1: a word" for line in lines)
    assert stopped == "the ranks ended 2 times and were not started again for"


def test_a_run_begins_its_own_line_behind_a_cut_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lines.jsonl"
    for before, after in [('{"na', '{"na\n'), ("{}\n", "{}\n"), ("", "")]:
        file.write_text(before)
        tiny(monkeypatch, stopped="", arguments=("--output", str(file)))
        assert file.read_text() == after


def line(name: str, dispatch: float, combine: float, **changes: Any) -> dict[str, Any]:
    """As of one start on four H200."""
    case = next(c for c in SUITES["all"] if c.name == name).as_dict()
    figures = {"p90_us": 1.0, "p99_us": 99.0, "max_us": 1.0, "remote_gb_s": 300.0, "logical_gb_s": 1.0}
    figures |= {"bytes_as_predicted": True, "busiest_port_bytes": 30_000_000, "remote_bytes": 20_000_000}
    ops = {op: {**figures, "p50_us": us} for op, us in (("dispatch", dispatch), ("combine", combine))}
    facts = {"ranks": 4, "device": "NVIDIA H200", "ceiling_gb_s": 360.0, "ingress_gb_s": 300.0}
    merged = {**case, **facts, **ops, **changes}
    return {**merged, "gpus_per_node": merged["ranks"] // merged["nodes"]}


def table(tmp_path: Path, *texts: str | bytes) -> Any:
    """The command on files of these contents; its table, as Markdown, is in page.md."""
    files = []
    for n, text in enumerate(texts):
        files.append(tmp_path / f"{n}.jsonl")
        files[-1].write_bytes(text if isinstance(text, bytes) else text.encode())
    return CliRunner().invoke(cli.app, ["table", *map(str, files), "--markdown", str(tmp_path / "page.md")])


def page_rows(tmp_path: Path) -> list[list[str]]:
    """Of the Markdown table, the head first."""
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in (tmp_path / "page.md").read_text().splitlines()
        if row.startswith("| ")
    ]
    return [rows[0], *rows[2:]]


@pytest.mark.parametrize(
    ("key", "values"),
    [("commit", ("aaaa", "bbbb")), ("rounds", (20, 200)), ("driver", ("580", "590")), ("nvshmem", ("3.4.5", "3.5.0"))],
)
def test_different_code_has_rows_of_its_own(tmp_path: Path, key: str, values: tuple[Any, Any]) -> None:
    lines = [
        line(name, us, us, **{key: value}) for name, us in (("prefill-4096", 100.0), ("normal-4096", 60.0)) for value in values
    ]
    lines[0]["dispatch"]["p50_us"] = 40.0  # of the first code alone: normal may take 1.25 times that
    done = table(tmp_path, *(json.dumps(one) + "\n" for one in lines))
    assert done.exit_code == 0 and key in done.output
    head, *rows = page_rows(tmp_path)
    assert head[-1] == key
    found = {(row[0], row[3], row[-1]): row for row in rows}
    assert len(found) == len(rows) == 8 and {row[2] for row in rows} == {"1"}
    verdicts = [found["normal-4096", "dispatch", str(value)] for value in values]
    assert [row[8] for row in verdicts] == ["missed, 1.20 x", "met"]


def test_the_same_code_has_no_column(tmp_path: Path) -> None:
    table(tmp_path, *(json.dumps(line("decode-1", 8.0, 8.0, commit="aaaa")) for _ in range(2)))
    text = (tmp_path / "page.md").read_text()
    assert "| remote bytes |\n" in text and "| decode-1 | 4 | 2 | dispatch |" in text and "- commit: aaaa\n" in text


def test_blocks_of_launches_are_shown_where_they_are_known(tmp_path: Path) -> None:
    new, old = line("decode-1", 8.0, 8.0), line("decode-8", 8.0, 8.0, waiting_sms=24)
    new["combine"]["blocks"] = {"combine": [132, 24], "sums": [2]}
    assert table(tmp_path, json.dumps(new) + "\n" + json.dumps(old)).exit_code == 0
    last = [row[-1] for row in page_rows(tmp_path)]
    assert last == ["blocks of each launch", "", "combine 132+24, sums 2", "", ""]


@pytest.mark.parametrize(
    "rest", ["", "\n\n", "\r\n", '{"name": "deco', '{"name": "deco\n{"error": "no", "name": "x", "ranks": 2}']
)
def test_blank_and_cut_lines_do_no_harm(tmp_path: Path, rest: str) -> None:
    done = table(tmp_path, json.dumps(line("decode-1", 8.0, 8.0)) + "\n" + rest)
    assert done.exit_code == 0, done.output
    assert "| decode-1 | 4 | 1 | dispatch |" in (tmp_path / "page.md").read_text()
    assert ("0.jsonl:2 is cut" in done.output.replace("\n", "")) == ("deco" in rest)


def test_an_empty_file_is_an_empty_table(tmp_path: Path) -> None:
    assert table(tmp_path, "").exit_code == 0
    assert "| case | ranks |" in (tmp_path / "page.md").read_text()


WHOLE = json.dumps(line("decode-1", 8.0, 8.0))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "0.jsonl:1: no JSON (Expecting value"),
        (WHOLE + "\nhello\n" + WHOLE, "0.jsonl:2: no JSON"),
        (WHOLE + "\n" + WHOLE + WHOLE + "\n", "0.jsonl:2: no JSON (Extra data"),
        (b"{}\n\xff\x00", "0.jsonl:2: no text (byte 3 is not UTF-8)"),
        (b"\x00\x01", "0.jsonl:1: no JSON"),
        ("[" * 100_000, "0.jsonl:1: no JSON"),
        ("[]", "0.jsonl:1: no line of the bench (a list, not an object)"),
        ("{}", "0.jsonl:1: no line of the bench (name: field required)"),
        ('{"error": 1, "name": "x", "ranks": 2}', "error: input should be a valid string"),
        (WHOLE.replace('"commit": null, ', "").replace('"ranks": 4', '"ranks": 0'), "ranks: input should be greater than"),
        (json.dumps(line("decode-1", 8.0, 8.0, commit=["a"])), "commit: input should be a valid string"),
        (json.dumps(line("decode-1", float("nan"), 8.0)), "dispatch.p50_us: input should be a finite number"),
    ],
)
def test_what_the_bench_did_not_write_is_refused(tmp_path: Path, text: str | bytes, reason: str) -> None:
    done = table(tmp_path, text)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.output
    assert reason in done.output and "`ep-backend bench --output FILE` wrote" in done.output
    assert len(done.output.splitlines()) == 1 and not (tmp_path / "page.md").exists()


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    said = refused(["table", str(tmp_path / "no.jsonl")])
    assert f"{tmp_path}/no.jsonl cannot be read: No such file or directory" in said
    assert f"{tmp_path} cannot be read: Is a directory" in refused(["table", str(tmp_path)])
    assert "/dev/zero cannot be read: not a regular file" in refused(["table", "/dev/zero"])
    file = tmp_path / "lines.jsonl"
    file.write_text("")
    assert "--markdown /proc/no/m.md: it cannot be written" in refused(["table", str(file), "--markdown", "/proc/no/m.md"])


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "docs" / "results").glob("kernels-*.jsonl")), ids=lambda f: f.stem
)
def test_recorded_results_are_read(file: Path) -> None:
    lines, notes = reading.read(file)
    assert lines and not notes and results.markdown(results.merge(lines))


def test_starts_are_merged_and_judged(tmp_path: Path) -> None:
    lines = [line("decode-1", 8.0 + n, 11.0) for n in range(3)]
    lines += [line("prefill-4096", 280.0, 540.0), line("normal-4096", 349.0, 600.0), line("hybrid-decode-128", 1.0, 1.0)]
    lines += [line("prefill-4096-zipf", 123.9, 126.2), {"name": "decode-8", "ranks": 4, "error": "rank 1: no"}]
    rows = results.cells(results.merge(lines))
    judged = {(row[0], row[3]): row[4:9] for row in rows}
    assert judged["decode-1", "dispatch"] == ("9", "9", "8 to 10", "99", "met")
    assert judged["decode-1", "combine"] == ("10", "11", "11 to 11", "99", "missed, 1.10 x")
    assert judged["normal-4096", "dispatch"] == ("350", "349", "", "99", "met")
    assert judged["hybrid-decode-128", "dispatch"][0] == "", "its base did not run"
    # 30 MB at 300 GB/s are 100 us, 15 percent more are allowed, and what one token takes.
    assert judged["prefill-4096-zipf", "dispatch"] == ("124", "123.9", "", "99", "met")
    assert judged["prefill-4096-zipf", "combine"] == ("126", "126.2", "", "99", "missed, 1.00 x")
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    page = tmp_path / "page.md"
    done = CliRunner().invoke(cli.app, ["table", str(file), "--markdown", str(page)])
    assert done.exit_code == 0 and "decode-8: rank 1: no" in done.output
    row = "| decode-1 | 4 | 3 | dispatch | 9 | 9 | 8 to 10 | 99 | met | 300 | 360 | 20000000 as predicted |"
    assert row in page.read_text()
    both = [line("decode-128", 20.0, 20.0), line("hybrid-decode-128", 30.0, 40.0)]
    assert [row[1:9] for row in results.cells([[one] for one in both])[2:]] == [
        ("4 (2 x 2)", "1", "dispatch", "32", "30", "", "99", "met"),
        ("4 (2 x 2)", "1", "combine", "32", "40", "", "99", "missed, 1.25 x"),
    ]
    halves = [[{**one, "ranks": 2, "gpus_per_node": 2 // one["nodes"]}] for one in both]
    for row in results.cells(halves)[2:]:
        assert row[1] == "2 (2 x 1)" and row[4] == row[8] == "", "nodes of one rank have only one of the two hops"
    other = line("prefill-4096", 1.0, 1.0, device="cpu")
    assert results.cells([[other]])[0][4] == "", "a target holds on its hardware only"


def test_targets_name_cases_that_exist() -> None:
    names = {c.name for c in SUITES["all"]}
    assert {*RATIOS, *(base for _, base in RATIOS.values()), *(n for by in LIMITS.values() for n in by)} <= names


@pytest.mark.parametrize(
    ("program", "gpus"),
    [
        ("echo one, 580.1; echo two, 580.1", ["one, 580.1", "two, 580.1"]),
        ("echo none found; exit 6", []),
        (None, []),
    ],
)
def test_where_a_result_was_taken(
    program: str | None, gpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nvidia-smi prints where it fails is no GPU."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if program is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert origin.gpus("name", "driver_version") == gpus
