"""Metrics for Prometheus, made from the ranks' answers when they are scraped. No label has more values than there are
ranks, nodes, modes or paths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from ep_backend.deployment.schema import RoleName
from ep_backend.stats import PATHS

PREFIX = "ep_backend_"
RANK = ("role", "engine", "ep_rank")
PORT = ("role", "engine", "node", "device", "port")
OPS = {"dispatch": ("dispatches", ""), "combine": ("combines", "combine_")}

Status = Mapping[str, Any]


class Ranks(Collector):
    """What each rank's buffer counted."""

    def __init__(self, statuses: Sequence[Status]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        per_op = (*RANK, "mode", "op")
        seconds = SummaryMetricFamily(
            PREFIX + "op_seconds", "Host time in an operation, waits included; 0 on GPUs", labels=per_op
        )
        sent = _counter("bytes", "Bytes written, by the way to the rank that gets them", *per_op, "path")
        records = _counter("records", "Records written, by the way to the rank that gets them", *per_op, "path")
        tokens = _counter("tokens", "Tokens that entered dispatch", *RANK, "mode")
        copies = _gauge("copies_per_token", "Records that left the rank a token, since start", *RANK, "mode")
        slots = _gauge("slots_high_water", "Most tokens one dispatch carried", *RANK, "mode")
        used = _gauge("slots_used_ratio", "The same over max_tokens: at 1 the next larger batch fails", *RANK, "mode")
        waited = _counter("recv_wait_seconds", "Time waited for records, by the node that sends them", *RANK, "src_node")
        mode = _gauge("mode_info", "1 for the mode that the last dispatch executed", *RANK, "mode")
        epoch = _gauge("mode_epoch", "Epoch of the dispatch that agreed on the mode; the same on all ranks", *RANK)
        changed = _counter("mode_changes", "Changes of mode that all ranks agreed on", *RANK)
        timeouts = _counter("timeouts", "Waits that ended without what they waited for", *RANK)
        phases = _counter("phase_seconds", "Host time in a phase, 0 on GPUs; normal mode does all in send", *per_op, "phase")
        held = _gauge("buffer_bytes", "Symmetric memory of the rank's buffers", *RANK, "region")
        sms = _gauge("num_sms", "SMs a kernel may use, where the deployment limits them", *RANK)
        fallback = _counter("fallback", "Batches that auto's first choice of mode could not carry, by why", *RANK, "reason")
        error = _gauge("model_error_ratio", "Host time of a dispatch and its combine over the plan's", *RANK, "mode")
        rate = _gauge("nic_rate_gbps", "Rate of an RDMA port's link, 0 while it is down", *PORT)
        faults = _counter("nic_errors", "What the driver counts of a port", *PORT, "counter")
        for status in self._statuses:
            rank = [str(status["role"]), str(status["engine"]), str(status["rank"])]
            for name, m in status["modes"].items():
                for op, (calls, prefix) in OPS.items():
                    seconds.add_metric([*rank, name, op], count_value=m[calls], sum_value=m[prefix + "seconds"])
                    for phase, spent in m[prefix + "phase_s"].items():
                        phases.add_metric([*rank, name, op, phase], spent)
                    for path in PATHS:
                        sent.add_metric([*rank, name, op, path], m[prefix + "bytes"][path])
                        records.add_metric([*rank, name, op, path], m[prefix + "records"][path])
                tokens.add_metric([*rank, name], m["tokens"])
                if m["tokens"]:
                    left = m["records"]["scale_up"] + m["records"]["scale_out"]
                    copies.add_metric([*rank, name], left / m["tokens"])
                slots.add_metric([*rank, name], m["slots_high_water"])
                used.add_metric([*rank, name], m["slots_high_water"] / status["max_tokens"][name])
            for region, size in status["buffer_bytes"].items():
                held.add_metric([*rank, region], size)
            if status["sms"] is not None:
                sms.add_metric(rank, status["sms"])
            for reason, times in status["fallbacks"].items():
                fallback.add_metric([*rank, reason], times)
            for name, planned in status["estimates"].items():
                m = status["modes"].get(name)
                if m and m["dispatches"] and m["seconds"]:
                    error.add_metric([*rank, name], (m["seconds"] + m["combine_seconds"]) / m["dispatches"] / planned)
            node, first = divmod(int(status["rank"]), int(status["gpus_per_node"]))
            for port in status["nics"] if first == 0 else ():
                place = [*rank[:2], str(node), port["device"], str(port["port"])]
                rate.add_metric(place, port["rate_gbps"])
                for name, count in port["errors"].items():
                    faults.add_metric([*place, name], count)
            for node, time in _by_node(status).items():
                waited.add_metric([*rank, str(node)], time)
            if status["mode_executed"]:
                mode.add_metric([*rank, status["mode_executed"]], 1)
            epoch.add_metric(rank, status["flip"]["agreed_epoch"])
            changed.add_metric(rank, status["flip"]["flips"])
            timeouts.add_metric(rank, status["timeouts"])
        slow = _gauge("slow_rank_score", "Waiting for a rank over the mean of all, since start", "role", "engine", "peer")
        for (role, engine), scores in _slowness(self._statuses).items():
            for peer, score in scores.items():
                slow.add_metric([role, engine, str(peer)], score)
        yield from (seconds, sent, records, tokens, copies, slots, used, waited, mode, epoch, changed, timeouts)
        yield from (phases, held, sms, fallback, error, rate, faults, slow)


class Control(Collector):
    """What the control service knows beyond its ranks."""

    def __init__(self, flips: Mapping[tuple[RoleName, str], int], drift: Mapping[str, int]) -> None:
        self._flips = flips
        self._drift = drift

    def collect(self) -> Iterator[Metric]:
        flips = _counter("flips", "Changes of mode asked for, by how they ended", "role", "result")
        for (role, result), count in self._flips.items():
            flips.add_metric([role, result], count)
        drift = _gauge("config_drift", "Differences between what runs and the file, or the mode desired of a rank", "class")
        for kind, count in self._drift.items():
            drift.add_metric([kind], count)
        yield from (flips, drift)


def exposition(*collectors: Collector) -> str:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry).decode()


def _by_node(status: Status) -> dict[int, float]:
    seconds: dict[int, float] = defaultdict(float)
    for peer, waited in status["wait_s"].items():
        seconds[int(peer) // int(status["gpus_per_node"])] += waited
    return seconds


def _slowness(statuses: Sequence[Status]) -> dict[tuple[str, str], dict[int, float]]:
    """By role and peer: mean time that the other ranks waited for it, over that mean of all peers. 1: like the others."""
    waits: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for status in statuses:
        for peer in range(int(status["world_size"])):
            if peer != int(status["rank"]):
                # JSON has turned the keys of an agent's own answer into text.
                waited = status["wait_s"].get(peer, status["wait_s"].get(str(peer), 0.0))
                waits[str(status["role"]), str(status["engine"])][peer].append(waited)
    scores = {}
    for role, peers in waits.items():
        means = {peer: sum(seconds) / len(seconds) for peer, seconds in peers.items()}
        overall = sum(means.values()) / len(means)
        if overall:
            scores[role] = {peer: mean / overall for peer, mean in means.items()}
    return scores


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)
