"""How ranks meet outside the data path: bounded exchanges over the process group's store."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ep_backend.config import TIMEOUT_S
from ep_backend.errors import EpConfigMismatch, EpError, ranks_by_value

T = TypeVar("T")
_making: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by group


class Meeting:
    """All ranks of one group, for the life of one buffer. The group itself may be destroyed earlier.

    The meetings of a group are numbered, and what is posted in one is seen in no other. ``next/r`` in the store is the least
    number in which rank r still takes part. It only grows: by an attempt to make a buffer, which takes a number above its
    last; by the sight of a peer with a higher number, which the attempt takes over; and by an attempt that fails. So ranks
    that retry and ranks that are late come together at the highest number of all, wherever others gave up.

    Posts of attempts that were given up: a rank posts nothing in a meeting below its ``next``. If a peer's ``next`` was above
    the number before its post was looked for and not found, that post will never come, and the wait ends at once. A post that
    a peer left behind may be found, but the peer has made none for a later exchange, where the wait ends in the same way. If a
    peer gives up in the last exchange itself, the first operation of the buffer finds that out.
    """

    def __init__(self, group: Any) -> None:
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise RuntimeError("torch.distributed has no process group; call init_process_group first (gloo suffices)")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this process is not in the group; only its ranks make the buffer, all of them")
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.timeout_s = TIMEOUT_S
        self._name = f"ep_backend/{group.group_name}"
        self._group = dist.distributed_c10d._get_process_group_store(group)
        self._number = 0
        self._store = self._group

    @contextlib.contextmanager
    def together(self, timeout_s: float) -> Iterator[None]:
        """Make the buffer within, with all ranks here. A failure lets those that wait for this rank know at once."""
        self.timeout_s = timeout_s
        lock = _making[self._name]  # numbers are one after the other in a process
        if not lock.acquire(timeout=timeout_s):
            raise EpError(
                f"rank {self.rank} waited {timeout_s:g} s for another thread of its process, which makes a buffer of this "
                "group; make the buffers of one group one after the other, in the same order on every rank"
            )
        try:
            self._meet()
            yield
        except BaseException:
            if self._number:  # else it never came
                with contextlib.suppress(Exception):
                    self._take_part_from(self._number + 1, seconds=0.5)
            raise
        finally:
            lock.release()

    def exchange(self, key: str, value: object) -> list[Any]:
        """Every rank's value, by rank. EpError names the ranks that did not come within the timeout, or gave up."""
        self.post(f"{key}/{self.rank}", value)
        left = list(range(self.size))
        for _ in _turns(self.timeout_s):
            gone = [r for r, n in zip(left, self._next(left), strict=True) if n > self._number]
            left = self._absent(key, left, self.timeout_s)
            if not left:
                return [pickle.loads(self._call(lambda r=r: self._store.get(f"{key}/{r}"))) for r in range(self.size)]  # type: ignore[misc]
            if gone := [r for r in gone if r in left]:
                raise EpError(
                    f"rank {self.rank} waits at {key!r} for rank {_list(gone)}, which gave up this buffer; "
                    "see that rank's own error, then rebuild on all ranks"
                )
        raise self._waited(key, left)

    def rendezvous(self, key: str, seconds: float) -> list[int]:
        """Wait at most that long until every rank is here; the ranks that are not. Never raises."""
        try:
            self.post(f"{key}/{self.rank}", True, seconds)
            left = list(range(self.size))
            for _ in _turns(seconds):
                left = self._absent(key, left, seconds)
                if not left:
                    break
            return left
        except Exception:  # the store itself may be gone with its rank
            return [r for r in range(self.size) if r != self.rank]

    def agree(self, config: dict[str, Any], error: ValueError | TypeError | None) -> None:
        """Raise on every rank if one rank's arguments are wrong, or if arguments differ."""
        everyone = self.exchange("config", (config, error))
        if error is not None:
            raise error
        for rank, (_, theirs) in enumerate(everyone):
            if theirs is not None:
                raise type(theirs)(f"rank {rank}: {theirs}")
        differences = []
        for field in config:
            values = [repr(c[field]) for c, _ in everyone]
            if len(set(values)) > 1:
                differences.append(f"{field} ({ranks_by_value(values)})")
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

    def _meet(self) -> None:
        """Find the number of the meeting and wait until all ranks are there."""
        everyone = left = list(range(self.size))
        theirs = self._next(everyone)
        highest = max(theirs[self.rank] + 1, *theirs)
        for _ in _turns(self.timeout_s):
            if highest > self._number:
                self._take_part_from(highest)
                self._store = PrefixStore(f"{self._name}/{highest}", self._group)
                self.post(f"here/{self.rank}", True)
                left = everyone
            left = self._absent("here", left, self.timeout_s)
            if not left:
                return
            highest = max(self._next(left))
        raise self._waited("here", left)

    def _take_part_from(self, number: int, seconds: float | None = None) -> None:
        self._number = number
        self._call(lambda: self._group.set(f"{self._name}/next/{self.rank}", str(number)), seconds)

    def _next(self, ranks: list[int]) -> list[int]:
        keys = [f"{self._name}/next/{r}" for r in ranks]
        return list(self._call(lambda: [int(self._group.get(k)) if self._group.check([k]) else 0 for k in keys]))

    def _absent(self, key: str, ranks: list[int], seconds: float) -> list[int]:
        return list(self._call(lambda: [r for r in ranks if not self._store.check([f"{key}/{r}"])], seconds))

    def _waited(self, key: str, left: list[int]) -> EpError:
        return EpError(
            f"rank {self.rank} waited {self.timeout_s:g} s for rank {_list(left)} at {key!r}; those processes have ended, "
            "stalled, or do not make this buffer"
        )

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


def _turns(seconds: float) -> Iterator[None]:
    """Once at once, then again until the time is over."""
    deadline = time.monotonic() + seconds
    yield
    while time.monotonic() < deadline:
        time.sleep(0.002)
        yield


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
