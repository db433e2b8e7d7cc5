"""How ranks meet outside the data path: bounded exchanges over the process group's store."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ep_backend.errors import EpConfigMismatch, EpError

T = TypeVar("T")
_meetings: Counter[str] = Counter()  # by group: every rank makes its buffers in the same order


class Meeting:
    """All ranks of one group, for the life of one buffer. The group itself may be destroyed earlier."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise RuntimeError("torch.distributed has no process group; call init_process_group first (gloo suffices)")
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.timeout_s = timeout_s
        name = str(group.group_name)
        _meetings[name] += 1
        store = dist.distributed_c10d._get_process_group_store(group)
        self._store = PrefixStore(f"ep_backend/{name}/{_meetings[name]}", store)

    def exchange(self, key: str, value: object) -> list[Any]:
        """Every rank's value, by rank. EpError names the ranks that did not come within the timeout."""
        self.post(f"{key}/{self.rank}", value)
        missing = self._missing(key, self.timeout_s)
        if missing:
            raise EpError(
                f"rank {self.rank} waited {self.timeout_s:g} s for rank {', '.join(map(str, missing))} at "
                f"{key!r}; those processes have ended, stalled, or do not make this buffer"
            )
        return [pickle.loads(self._call(lambda r=r: self._store.get(f"{key}/{r}"))) for r in range(self.size)]  # type: ignore[misc]

    def rendezvous(self, key: str, seconds: float) -> list[int]:
        """Wait at most that long until every rank is here; the ranks that are not. Never raises."""
        try:
            self.post(f"{key}/{self.rank}", True, seconds)
            return self._missing(key, seconds)
        except Exception:  # the store itself may be gone with its rank
            return [r for r in range(self.size) if r != self.rank]

    def agree(self, config: dict[str, Any], error: str | None) -> None:
        """Raise on every rank if one rank's arguments are wrong, or if arguments differ."""
        everyone = self.exchange("config", (config, error))
        if error is not None:
            raise ValueError(error)
        for rank, (_, theirs) in enumerate(everyone):
            if theirs is not None:
                raise ValueError(f"rank {rank}: {theirs}")
        differences = []
        for field in config:
            values = [repr(c[field]) for c, _ in everyone]
            if len(set(values)) > 1:
                by_value = {v: [r for r, w in enumerate(values) if w == v] for v in values}
                said = "; ".join(f"rank {', '.join(map(str, r))}: {v}" for v, r in by_value.items())
                differences.append(f"{field} ({said})")
        if differences:
            raise EpConfigMismatch("ranks of one buffer must give equal arguments, but differ in " + " and ".join(differences))

    def post(self, key: str, value: object, seconds: float | None = None) -> None:
        self._call(lambda: self._store.set(key, pickle.dumps(value)), seconds)  # type: ignore[arg-type]

    def peek(self, key: str, default: T, seconds: float = 0.5) -> T:
        """What a rank has posted there, or the default; also if the store does not answer in time."""
        try:
            if not self._call(lambda: self._store.check([key]), seconds):
                return default
            value: T = pickle.loads(self._call(lambda: self._store.get(key), seconds))
            return value
        except Exception:
            return default

    def _missing(self, key: str, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        left = list(range(self.size))
        while True:
            left = [r for r in left if not self._call(lambda r=r: self._store.check([f"{key}/{r}"]), seconds)]  # type: ignore[misc]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.002)

    def _call(self, step: Callable[[], Any], seconds: float | None = None) -> Any:
        """Run a store operation in a thread: a client of a stopped store server would wait for ever."""
        result: list[Any] = []

        def run() -> None:
            try:
                result.append((step(), None))
            except BaseException as e:
                result.append((None, e))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        limit = self.timeout_s if seconds is None else seconds
        thread.join(limit)
        if not result:
            raise EpError(f"rank {self.rank}: the process group's store did not answer in {limit:g} s")
        value, error = result[0]
        if error is not None:
            raise EpError(f"rank {self.rank}: the process group's store failed: {error}") from error
        return value
