"""Runs a deployment in this process: starts its instances, waits until they serve, and stops all if one dies."""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue

import httpx

from ep_backend.control.audit import Audit
from ep_backend.control.controller import RestartFailed
from ep_backend.control.door import Door
from ep_backend.control.service import start_service
from ep_backend.deployment.agents import rank_statuses
from ep_backend.deployment.instances import (
    Instance,
    engine_instances,
    namespaces_of,
    role_instances,
    router_instance,
    without_proxy,
)
from ep_backend.deployment.interpreters import NoInterpreter
from ep_backend.deployment.load import Loaded
from ep_backend.deployment.logs import last_errors
from ep_backend.deployment.namespaces import inside, namespaces
from ep_backend.deployment.problems import DeploymentError
from ep_backend.deployment.processes import (
    ended_as,
    ending,
    session_members,
    session_of,
    shared_memory_of,
    signals_noted,
    start_ticks,
    stop_sessions,
)
from ep_backend.deployment.schema import Deployment, RoleName
from ep_backend.deployment.state import InstanceState, RunState, remove_state, run_dir, write_state
from ep_backend.errors import OutputLost
from ep_backend.serving import Background, base_url

POLL_S = 0.5

OnChange = Callable[[RunState], None]


class InstanceFailed(Exception):
    """An instance ended or did not come up; the message names its log and the last error lines in it."""

    def __init__(self, instance: InstanceState, what: str) -> None:
        super().__init__(what)
        self.instance = instance
        self.lines = last_errors(instance.log)

    def __str__(self) -> str:
        lines = "".join(f"\n    {line}" for line in self.lines)
        return f"{self.instance.name} {self.args[0]}; its log {self.instance.log} ends with:{lines}"


class Stopped(Exception):
    """A signal asked for the end."""


class Supervisor:
    def __init__(self, loaded: Loaded, on_change: OnChange) -> None:
        deployment = loaded.deployment
        router = deployment.router
        self.loaded = loaded
        self.deployment = deployment
        self.on_change = on_change
        self.folder = run_dir(deployment.name)
        self.children: list[subprocess.Popen[bytes]] = []
        self.ranks: dict[int, tuple[int, int]] = {}
        """By process: the leader of its launch, and its rank."""
        self.shared: set[Path] = set()
        self.signals: SimpleQueue[int] = SimpleQueue()  # what a signal's handler puts there, another may interrupt
        self.engines: list[Instance] = []
        target = deployment.target
        patience = 2 * (target.drain_timeout_s + target.stop_timeout_s + target.start_timeout_s)
        self.door = Door(patience) if router.hold else None
        self.restarts: SimpleQueue[tuple[RoleName, Deployment, Deployment, Future[None]]] = SimpleQueue()
        self.state = RunState(
            name=deployment.name,
            pid=os.getpid(),
            start_ticks=start_ticks(os.getpid()) or 0,
            started_at=time.time(),
            url=base_url(router.host, router.port),
            served_name=deployment.model.served_name,
            key=deployment.control.key,
            stop_timeout_s=target.stop_timeout_s,
        )

    def run(self) -> None:
        """Serves until a signal or a failure. Raises InstanceFailed; nothing is left running either way.

        Raises DeploymentError, before anything is started, if the control service cannot listen.
        """
        with self._services(), signals_noted(self.signals.put):
            try:
                self._start()
                while True:
                    self._wait_a_moment()
                    self._restart_asked()
            except Stopped:
                self._stop()
                remove_state(self.state.name)
            except BaseException as error:
                self._stop()
                with contextlib.suppress(DeploymentError):
                    self._enter("failed", str(error))
                raise

    async def restart(self, role: RoleName, wanted: Deployment, running: Deployment) -> None:
        """Start a role anew as ``wanted`` has it; done by this object's own thread. Raises RestartFailed, and then the role
        is again as ``running`` has it, which knows of flips and of roles that were restarted before this one."""
        done: Future[None] = Future()
        self.restarts.put((role, wanted, running, done))
        await asyncio.wrap_future(done)

    @contextlib.contextmanager
    def _services(self) -> Iterator[None]:
        """The control service, and what the file asks for: a door, namespaces."""
        audit, router = Audit(self.folder / "audit.jsonl"), self.deployment.router
        with contextlib.ExitStack() as stack:
            try:
                service = start_service(self.loaded, lambda: self.state, self.restart, audit)
                stack.callback(service.stop)
                if self.door is not None:
                    door = Background(self.door, name="door", setting="router.", host=router.host, port=router.port)
                    stack.callback(door.stop)
                if spaces := namespaces_of(self.deployment):
                    stack.enter_context(namespaces(spaces))
            except (ValueError, OSError) as error:
                raise DeploymentError([str(error)]) from None
            self.state.control_url = base_url(self.deployment.control.host, service.port)
            yield

    def _start(self) -> None:
        self._enter("starting")
        self.engines = engine_instances(self.deployment, self.folder)
        self._bring_up(self.engines)

    def _bring_up(self, engines: list[Instance]) -> None:
        """Start these engines, then the router, which wants them all."""
        self._launch(engines)
        self._wait_healthy(engines)
        router = router_instance(self.deployment, self.engines)
        if router is not None:
            self._launch([router])
            self._wait_healthy([router])
        self._note_ranks()
        self.shared |= shared_memory_of(session_members(self._leaders()))
        if self.door is not None:
            self.door.target = next(i.url for i in self.state.instances if i.url and i.role in (None, "unified"))
        self._enter("ready")

    def _restart_asked(self) -> None:
        while not self.restarts.empty():
            role, wanted, running, done = self.restarts.get()
            try:
                write_state(self.state)
            except DeploymentError as error:  # the disk may be full: then nothing may end that is to start again
                done.set_exception(RestartFailed(f"{error}; {role} runs on as it was"))
                continue
            try:
                try:
                    self._relaunch(role, wanted)
                except (InstanceFailed, NoInterpreter, DeploymentError, OSError) as failure:
                    self._keep_logs(role)
                    self._relaunch(role, running)
                    done.set_exception(RestartFailed(f"{failure}\n{role} runs with its old settings again"))
                else:
                    done.set_result(None)
            except BaseException as error:
                done.set_exception(RestartFailed(str(error)))
                raise

    def _relaunch(self, role: RoleName, deployment: Deployment) -> None:
        self._enter("starting")
        self.deployment, self.state.stop_timeout_s = deployment, deployment.target.stop_timeout_s
        self._drain()
        self._end(role)
        settings = dict(deployment.roles.items())[role]
        anew = role_instances(deployment, role, settings, self.folder)
        self.engines = [engine for engine in self.engines if engine.role != role] + anew
        self._bring_up(anew)

    def _drain(self) -> None:
        """Close the door, and wait a while for those inside to finish."""
        if self.door is None:
            return
        self.door.target = None
        deadline = time.monotonic() + self.deployment.target.drain_timeout_s
        while self.door.inside and time.monotonic() < deadline:
            self._wait_a_moment()

    def _end(self, role: RoleName) -> None:
        """Stop the role and the router, which knows it by addresses that go."""
        going = [instance for instance in self.state.instances if instance.role in (role, None)]
        pids = [instance.pid for instance in going]
        stop_sessions(pids, shared_memory_of(session_members(pids)), self.deployment.target.stop_timeout_s)
        for child in self.children:
            child.poll()
        self.children = [child for child in self.children if child.pid not in pids]
        self.state.instances = [instance for instance in self.state.instances if instance.pid not in pids]
        self.ranks = {pid: (leader, rank) for pid, (leader, rank) in self.ranks.items() if leader not in pids}

    def _keep_logs(self, role: RoleName) -> None:
        """The next start of these instances writes to other files; what these say is evidence."""
        for instance in self.state.instances:
            if instance.role in (role, None):
                instance.log = instance.log.replace(instance.log.with_suffix(".failed.log"))

    def _launch(self, instances: list[Instance]) -> None:
        for instance in instances:
            log = self.folder / f"{instance.name}.log"
            with log.open("wb") as output:
                child = subprocess.Popen(
                    inside(instance.namespace, instance.command) if instance.namespace else instance.command,
                    env=without_proxy({**os.environ, **instance.env}, [*self.engines, instance]),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.children.append(child)
            self.state.instances.append(
                InstanceState(
                    name=instance.name,
                    role=instance.role,
                    started_at=time.time(),
                    log=log,
                    agents=instance.agents,
                    url=instance.health.rpartition("/")[0] if instance.health else None,
                    pid=child.pid,
                    start_ticks=start_ticks(child.pid) or 0,
                )
            )
        self._changed()

    def _wait_healthy(self, instances: list[Instance]) -> None:
        limit = self.deployment.target.start_timeout_s
        deadline = time.monotonic() + limit
        waiting = {instance.name: instance.health for instance in instances if instance.health}
        while waiting:
            for state in self.state.instances:
                health = waiting.get(state.name)
                if health and _answers(health):
                    state.ready_after_s = time.time() - state.started_at
                    del waiting[state.name]
                elif health and time.monotonic() > deadline:
                    raise InstanceFailed(state, f"did not serve within target.start_timeout_s = {limit:g}")
            self._changed()
            self._wait_a_moment()

    def _note_ranks(self) -> None:
        for instance in self.state.instances:
            for status in rank_statuses(instance, self.state.key):
                if status.error is not None:
                    raise InstanceFailed(instance, f"serves, but its agent {status.agent} does not: {status.error}")
                self.ranks[status.pid] = (session_of(status.pid) or instance.pid, status.rank)

    def _wait_a_moment(self) -> None:
        """Raises Stopped if a signal came, InstanceFailed if a process died."""
        with contextlib.suppress(Empty):
            self.signals.get(timeout=POLL_S)
            raise Stopped
        for child, instance in zip(self.children, self.state.instances, strict=True):
            # Ranks first: an engine that loses one may well end with status 0.
            lost = [(rank, pid) for pid, (leader, rank) in self.ranks.items() if leader == child.pid and not start_ticks(pid)]
            code = child.poll()
            if lost or code is not None:
                raise InstanceFailed(instance, _how_it_ended(code, lost))

    def _stop(self) -> None:
        try:
            with contextlib.suppress(DeploymentError):
                self._enter("stopping")
        finally:
            stop_sessions(self._leaders(), self.shared, self.deployment.target.stop_timeout_s)
            for child in self.children:
                child.poll()

    def _leaders(self) -> list[int]:
        return [child.pid for child in self.children]

    def _enter(self, phase: str, error: str | None = None) -> None:
        self.state = self.state.model_copy(update={"phase": phase, "error": error})
        self._changed()

    def _changed(self) -> None:
        write_state(self.state)
        # The terminal or pipe may be gone; what runs is served, and stopped, all the same.
        with contextlib.suppress(OSError, OutputLost):
            self.on_change(self.state)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _how_it_ended(code: int | None, lost: list[tuple[int, int]]) -> str:
    """An instance's exit status and its ranks (number, process) that are gone. What a signal ended is the cause itself."""
    if code is not None and code < 0:
        return ended_as(code)
    parts = [" and ".join(f"lost rank {rank} (process {pid} {ending(pid)})" for rank, pid in lost)] if lost else []
    if code is not None:
        parts.append(ended_as(code))
    return ", then ".join(parts)
