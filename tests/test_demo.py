"""The demo's verdict: one wrong token or one silent counter fails it."""

import threading
from pathlib import Path

import pytest
from rich.console import Console

from ep_backend import demo
from ep_backend.demo import (
    LONGEST,
    NEW_TOKENS,
    PROMPTS,
    SHORTEST,
    Round,
    deltas_of,
    make_prompts,
    run_demo,
    verdict,
    write_deployment,
)
from ep_backend.deployment.rank_status import ModeCounters, RankStatus
from ep_backend.deployment.state import InstanceState, RunState

EXPECTED = [list(range(NEW_TOKENS))] * PROMPTS
MOVED = ModeCounters(dispatches=4, combines=4, records={"local": 9, "scale_up": 9}, bytes={"local": 9216, "scale_up": 9216})


def status(counters: ModeCounters, executed: str = "direct", each: int = 2) -> RankStatus:
    here = {"role": "prefill", "rank": 0, "world_size": 2, "gpus_per_node": each}
    return RankStatus(agent="a", **here, mode_executed=executed, modes={executed: counters})


def round_of(answers: list[list[int]], silent: list[str]) -> Round:
    return Round("direct", "low_latency", answers, 1.0, [], silent)


def test_prompts_are_different_and_of_the_promised_lengths() -> None:
    prompts = make_prompts()
    lengths = [len(prompt) for prompt in prompts]
    assert len(set(prompts)) == PROMPTS and lengths[0] == SHORTEST and lengths[-1] == LONGEST
    assert lengths == sorted(set(lengths))


def test_all_equal_passes() -> None:
    assert verdict(Console(), EXPECTED, [round_of(EXPECTED, [])], break_combine=False, seconds=1.0)


def test_one_wrong_token_fails(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [list(tokens) for tokens in EXPECTED]
    answers[3][7] += 1
    assert not verdict(Console(), EXPECTED, [round_of(answers, [])], break_combine=True, seconds=1.0)
    assert "15 of 16 prompts equal" in capsys.readouterr().out


def test_a_silent_counter_fails(capsys: pytest.CaptureFixture[str]) -> None:
    _, silent = deltas_of([status(MOVED)], [status(MOVED)], {"prefill": "direct"})
    assert "prefill rank 0, direct: no dispatches" in silent
    assert not verdict(Console(), EXPECTED, [round_of(EXPECTED, silent)], break_combine=False, seconds=1.0)


def test_another_mode_than_asked_is_told() -> None:
    flipped = status(MOVED).model_copy(update={"mode_executed": "normal"})
    _, silent = deltas_of([status(ModeCounters())], [flipped], {"prefill": "direct"})
    assert silent == ["prefill rank 0: executed normal, not direct"]


@pytest.mark.parametrize(("mode", "lacks"), [("direct", ["scale_out"]), ("hybrid", ["scale_out", "forwarded"])])
def test_between_nodes_records_must_cross_them(mode: str, lacks: list[str]) -> None:
    _, silent = deltas_of([status(ModeCounters(), mode, 1)], [status(MOVED, mode, 1)], {"prefill": mode})
    assert silent == [f"prefill rank 0, {mode}: no {path} {what}" for path in lacks for what in ("records", "bytes")]


def test_ranks_at_work_are_read_at_the_same_dispatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reading(*dispatches: int) -> list[RankStatus]:
        return [status(ModeCounters(dispatches=count, combines=count)) for count in dispatches]

    instance = InstanceState(name="decode", role="decode", log=tmp_path, pid=1, start_ticks=1)
    place = {"pid": 1, "start_ticks": 1, "started_at": 0.0, "url": "u", "served_name": "m"}
    state = RunState(name="demo", instances=[instance], **place)
    readings = iter([reading(250, 258), reading(259, 260), reading(261, 261), reading(262, 263)])
    monkeypatch.setattr(demo, "rank_statuses", lambda *_: next(readings))
    assert [rank.modes["direct"].dispatches for rank in demo.even_statuses(state)] == [261, 261]
    monkeypatch.setattr(demo, "rank_statuses", lambda *_: reading(1, 2))
    assert len(demo.even_statuses(state)) == 2


def test_what_came_after_a_flip_counts_though_the_answers_end_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a fast machine nothing may be left to do when the flip has returned."""
    place = {"pid": 1, "start_ticks": 1, "started_at": 0.0, "url": "u", "served_name": "m"}
    state = RunState(name="demo", instances=[], **place)
    flipped = threading.Event()
    both = {"direct": MOVED, "normal": MOVED}
    monkeypatch.setattr(demo, "stream", lambda *_: iter(EXPECTED[0]))
    monkeypatch.setattr(demo, "_flip", lambda *_: flipped.set())
    monkeypatch.setattr(
        demo,
        "even_statuses",
        lambda _: [status(MOVED, "normal").model_copy(update={"modes": both}) if flipped.is_set() else status(MOVED)],
    )
    found = demo._run_round(Console(), state, make_prompts(), "normal", "hybrid", flip_file=tmp_path)
    assert found.answers == EXPECTED and found.silent == []
    assert [delta.dispatches for _, _, delta in found.deltas] == [MOVED.dispatches]


def test_a_broken_deployment_differs_only_in_its_environment(tmp_path: Path) -> None:
    good = write_deployment(tmp_path, tmp_path, "direct", "hybrid", break_combine=False).read_text()
    bad = write_deployment(tmp_path, tmp_path, "direct", "hybrid", break_combine=True).read_text()
    assert "EP_BACKEND_FAULT" not in good and bad.count("EP_BACKEND_FAULT: combine") == 2


def test_a_file_where_the_folder_belongs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".ep").touch()
    assert not run_demo(break_combine=False)
    assert f"failed: {tmp_path / '.ep'} is a file, must be a folder; move it away" in capsys.readouterr().out
