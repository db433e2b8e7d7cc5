"""What Prometheus scrapes: the ranks' own counters under bounded labels, and a dashboard that asks for nothing else."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML

from ep_backend.control.metrics import Ranks, exposition
from ep_backend.control.nics import ports
from ep_backend.deployment.rank_status import RankStatus
from tests.control.conftest import Service
from tests.control.instance import FACTS, Instance, instance

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "ep_backend.json"
RULES = DEPLOY / "prometheus" / "ep_backend.yaml"
Series = dict[str, list[dict[str, str]]]  # by sample name: the labels of each series


@pytest.fixture
def scraped(ranks: Any, service: Callable[..., Service], tmp_path: Path) -> Iterator[tuple[Service, Instance]]:
    """A service whose two prefill ranks have run both modes; decode has none."""
    with instance(ranks(2), "prefill", "direct", tmp_path / "stop", busy=False) as prefill:
        control = service(prefill=prefill)
        httpx.post(f"{prefill.url}/v1/completions", json={}, timeout=60)
        flip_and_rest(control, "normal")
        yield control, prefill


def flip_and_rest(control: Service, mode: str) -> None:
    """Returns when the steps that the flip asked for are over: then counters stand still."""
    assert control.flip("prefill", mode).json()["outcome"] == "applied"
    combines: list[int] = []
    deadline = time.monotonic() + 60
    while len(combines) < 5 or len(set(combines[-5:])) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        combines.append(sum(m["combines"] for rank in control.role("prefill")["ranks"] for m in rank["modes"].values()))


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def series(text: str) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.fixture
def sampled(scraped: tuple[Service, Instance], tmp_path: Path) -> Series:
    """All there can be: what was scraped, and what a host with RDMA ports adds."""
    control, prefill = scraped
    status = httpx.get(f"{prefill.agents[0]}/status", timeout=60).json()
    assert status["nics"] == ports()
    with_nics = series(exposition(Ranks([{**status, "nics": ports(infiniband(tmp_path))}])))
    return {**with_nics, **series(control.client.get("/metrics").text)}


def infiniband(folder: Path) -> Path:
    """A tree like /sys/class/infiniband: a working port, and one that is down and counts nothing."""
    files = {
        "mlx5_0/ports/1/state": "4: ACTIVE",
        "mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "mlx5_0/ports/1/hw_counters/out_of_sequence": "7",
        "mlx5_0/ports/1/hw_counters/lifespan": "12",
        "mlx5_0/ports/1/counters/symbol_error": "2",
        "mlx5_0/ports/1/counters/link_downed": "N/A (no PMA)",
        "mlx5_10/ports/1/state": "1: DOWN",
        "mlx5_10/ports/1/rate": "2.5 Gb/sec (1X SDR)",
    }
    for name, text in files.items():
        file = folder / "infiniband" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return folder / "infiniband"


def queries() -> list[tuple[str, str]]:
    """Expression and legend of each target."""
    return [(t["expr"], t["legendFormat"]) for panel in json.loads(DASHBOARD.read_text())["panels"] for t in panel["targets"]]


def test_values_are_the_ranks_own(scraped: tuple[Service, Instance]) -> None:
    control, prefill = scraped
    found = families(control.client.get("/metrics").text)
    status = control.role("prefill")["ranks"][1]

    def value(family: str, name: str | None = None, **labels: str) -> float:
        wanted = {"role": "prefill", "engine": "fake", "ep_rank": "1", **labels}
        (sample,) = (s for s in found[f"ep_backend_{family}"].samples if s.labels == wanted and s.name.endswith(name or ""))
        return float(sample.value)

    for mode in ("direct", "normal"):
        counted = status["modes"][mode]
        assert counted["dispatches"] > 0
        assert value("op_seconds", "_count", mode=mode, op="dispatch") == counted["dispatches"]
        assert value("op_seconds", "_sum", mode=mode, op="combine") == pytest.approx(counted["combine_seconds"])
        assert 0 < counted["seconds"] < 60
        for path in ("local", "scale_up", "scale_out", "forwarded"):
            assert value("bytes", mode=mode, op="dispatch", path=path) == counted["bytes"][path]
            assert value("records", mode=mode, op="combine", path=path) == counted["combine_records"][path]
        assert counted["bytes"]["scale_up"] > 0
        assert value("tokens", mode=mode) == counted["tokens"]
        copies = (counted["records"]["scale_up"] + counted["records"]["scale_out"]) / counted["tokens"]
        assert value("copies_per_token", mode=mode) == pytest.approx(copies)
        assert value("slots_high_water", mode=mode) == counted["slots_high_water"]
        assert value("slots_used_ratio", mode=mode) == pytest.approx(counted["slots_high_water"] / status["max_tokens"][mode])
        for phase, seconds in counted["combine_phase_s"].items():
            assert value("phase_seconds", mode=mode, op="combine", phase=phase) == pytest.approx(seconds)
        assert set(counted["phase_s"]) == {"send", "receive"}
        assert sum(counted["phase_s"].values()) == pytest.approx(counted["seconds"])
    assert value("recv_wait_seconds", src_node="0") == pytest.approx(sum(status["wait_s"].values()))
    assert {region for region, size in status["buffer_bytes"].items() if size} >= {"control", "words", "dispatch", "combine"}
    for region, size in status["buffer_bytes"].items():
        assert value("buffer_bytes", region=region) == size
    assert sum(status["expert_rows"]) > 0
    assert value("num_sms") == 20 and value("fallback", reason="capacity") == 3
    direct = status["modes"]["direct"]
    measured = (direct["seconds"] + direct["combine_seconds"]) / direct["dispatches"]
    assert value("model_error_ratio", mode="direct") == pytest.approx(measured / FACTS["estimates"]["direct"])
    assert value("mode_info", mode="normal") == 1
    assert value("mode_epoch") == status["flip"]["agreed_epoch"] > 0
    assert value("mode_changes") == 1 and value("timeouts") == 0
    flips = found["ep_backend_flips"].samples
    assert [(s.labels, s.value) for s in flips] == [({"role": "prefill", "result": "applied"}, 1)]
    drift = {s.labels["class"]: s.value for s in found["ep_backend_config_drift"].samples}
    assert drift == {"file": 1, "rank": 1}  # the file still says direct; decode's rank does not answer

    own = families(httpx.get(f"{prefill.agents[1]}/metrics", timeout=60).text)
    assert set(found) - set(own) == {"ep_backend_flips", "ep_backend_config_drift"}
    assert {s.labels.get("ep_rank", "1") for family in own.values() for s in family.samples} == {"1"}


def test_no_label_grows_with_experts_or_time(scraped: tuple[Service, Instance]) -> None:
    control, _ = scraped
    before = series(control.client.get("/metrics").text)
    flip_and_rest(control, "direct")
    after = series(control.client.get("/metrics").text)
    del before["ep_backend_mode_info"], after["ep_backend_mode_info"]
    assert before == after
    bounded = {"role", "engine", "ep_rank", "mode", "op", "path", "src_node", "result", "class"}
    bounded |= {"phase", "region", "reason", "peer"}
    assert {label for found in after.values() for labels in found for label in labels} <= bounded
    assert max(map(len, after.values())) == 2 * 2 * 2 * 4  # ranks, modes, operations, paths


def test_the_dashboard_asks_for_what_is_there_and_for_all_of_it(sampled: Series) -> None:
    found = sampled
    assert queries()
    asked = set()
    for expression, legend in queries():
        names = set(re.findall(r"\bep_backend_\w+", expression))
        assert names and names <= set(found), expression
        asked |= names
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        used = grouped | set(re.findall(r"{{(\w+)}}", legend)) | set(re.findall(r"(\w+)=~", expression))
        for name in names:
            assert used <= set(found[name][0]), (expression, name)
    assert asked == set(found)


def test_alerts_ask_for_what_is_there(sampled: Series) -> None:
    document = YAML(typ="safe").load(RULES)
    assert document["kind"] == "PrometheusRule"
    rules = [rule for group in document["spec"]["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        expression = rule["expr"]
        assert expression.count("(") == expression.count(")")
        names = re.findall(r"\bep_backend_\w+", expression)
        assert names and set(names) <= set(sampled), expression
        labels = {label for name in names for label in sampled[name][0]}
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        matched = re.findall(r"(\w+)=\"(\w+)\"", expression)
        assert grouped | {label for label, _ in matched} <= labels, expression
        said = rule["annotations"]["summary"] + rule["annotations"]["description"]
        assert set(re.findall(r"\$labels\.(\w+)", said)) <= grouped, said


def test_ports_of_a_host(tmp_path: Path) -> None:
    assert ports(tmp_path / "absent") == []
    up, down = ports(infiniband(tmp_path))
    assert up == {"device": "mlx5_0", "port": 1, "rate_gbps": 400.0, "errors": {"out_of_sequence": 7, "symbol_error": 2}}
    assert down == {"device": "mlx5_10", "port": 1, "rate_gbps": 0.0, "errors": {}}


def test_a_slow_rank_stands_out() -> None:
    def status(rank: int, waits: dict[int, float]) -> dict[str, Any]:
        own = RankStatus(agent="", role="decode", rank=rank, world_size=3, engine="e", wait_s=waits)
        return own.model_dump()

    text = exposition(Ranks([status(0, {1: 1.0, 2: 9.0}), status(1, {0: 1.0, 1: 50.0, 2: 11.0}), status(2, {0: 1.0, 1: 1.0})]))
    scores = {s.labels["peer"]: s.value for s in families(text)["ep_backend_slow_rank_score"].samples}
    assert scores == pytest.approx({"0": 0.25, "1": 0.25, "2": 2.5})


def test_every_panel_has_its_own_place() -> None:
    document = json.loads(DASHBOARD.read_text())
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in document["panels"])
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    names = {variable["name"] for variable in document["templating"]["list"]}
    assert {"datasource", "role"} == names == set(re.findall(r"\$\{?(datasource|role)\b", DASHBOARD.read_text()))
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
