"""What the control service does: reads every rank, flips a role, applies a file. Knows nothing of HTTP routes."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import get_args

import httpx

from ep_backend.control.changes import changes, mode_of, with_mode
from ep_backend.control.drain import Limits, drain
from ep_backend.control.models import Applied, Change, DeploymentStatus, FlipResult, Pending, RoleStatus
from ep_backend.control.ranks import RankFailed, Ranks, silence
from ep_backend.control.vllm_admin import VllmAdmin
from ep_backend.deployment.agents import TIMEOUT_S
from ep_backend.deployment.changes import reachable
from ep_backend.deployment.checks import check_restartable
from ep_backend.deployment.load import Loaded, load
from ep_backend.deployment.problems import DeploymentError
from ep_backend.deployment.rank_status import RankStatus
from ep_backend.deployment.schema import Deployment, ModeName, RoleName, serves_both_families
from ep_backend.deployment.state import InstanceState, RunState
from ep_backend.errors import did_you_mean

POLL_S = 0.05
PROMPT = "a change of mode needs steps"
STEPS = 4  # tokens asked of an idle instance: the first step agrees, the second one runs the new mode

Restart = Callable[[RoleName, Deployment, Deployment], Awaitable[None]]
"""Start a role anew as the first one has it; where it does not come up, as the second one does, and raise RestartFailed."""


class Busy(Exception):
    """Another change is under way."""


class NotAllowed(Exception):
    """A value that this deployment cannot take."""

    def __init__(self, what: str, allowed: list[str]) -> None:
        super().__init__(what)
        self.allowed = allowed


class NeedsRestart(Exception):
    """Changes that no flip can make, without leave to restart."""

    def __init__(self, blocked: list[Change]) -> None:
        redeploy = any(change.action == "redeploy" for change in blocked)
        fix = "stop the deployment and start it again" if redeploy else "ask for a restart (flip --restart)"
        super().__init__(f"{'; '.join(map(str, blocked))}; {fix}. Nothing was changed")
        self.blocked = blocked


class RestartFailed(Exception):
    """A role did not come up as asked; the message says why, and what runs now."""


class Controller:
    """One running deployment. At most one change at a time; reading is always possible."""

    def __init__(self, loaded: Loaded, state: Callable[[], RunState], restart: Restart) -> None:
        self._file = loaded.file
        self.running = loaded.deployment
        self._started = {role: mode_of(self.running, role) for role in self._role_names()}
        self._state = state
        self._restart = restart
        self._change = asyncio.Lock()
        self._pending: dict[RoleName, Pending] = {}
        self._abandoned: dict[RoleName, int] = {}  # the last token, which ranks take for one that comes late
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        self.outcomes: Counter[tuple[RoleName, str]] = Counter()

    async def status(self) -> DeploymentStatus:
        state = self._state()
        drift, fault = await asyncio.to_thread(self._file_drift)
        roles = await asyncio.gather(*(self._role_status(role) for role, _ in self.running.roles.items()))
        return DeploymentStatus(
            name=state.name,
            phase=state.phase,
            url=state.url,
            file=str(self._file),
            drift=drift,
            file_error=fault,
            roles=list(roles),
            instances=state.instances,
        )

    async def flip(self, role: str, mode: str, dry_run: bool = False) -> FlipResult:
        """Change a role's mode on every rank at the same step, or on none.

        Raises NotAllowed, Busy, and RankFailed with the ranks that could not; after RankFailed the old mode goes on.
        """
        name = next((known for known in self._role_names() if known == role), None)
        if name is None:
            raise NotAllowed(f"{self.running.name} has no role {role!r}", list(self._role_names()))
        allowed = self._reachable(name)
        wish = next((known for known in get_args(ModeName) if known == mode and known in allowed), None)
        if wish is None:
            if mode not in get_args(ModeName):
                hint = did_you_mean(mode, get_args(ModeName), f"{role} can be flipped to {', '.join(allowed)}")
                raise NotAllowed(f"mode {mode!r} is unknown; {hint}", allowed)
            raise NotAllowed(f"mode {mode!r} cannot be reached by {role} without a restart", allowed)
        async with self._only_change():
            return await self._flip(name, wish, dry_run)

    async def apply(self, text: str, dry_run: bool, restart: bool) -> Applied:
        """Make the deployment what the file's text says. Raises DeploymentError, NeedsRestart, Busy, RankFailed,
        RestartFailed.

        Every rank is asked before anything changes. A flip that fails ends it; what was changed before stays.
        """
        loaded = load(self._file, text)
        wanted = loaded.deployment
        if wanted.name != self.running.name:
            raise DeploymentError([f"name: is {wanted.name}, but this is {self.running.name}; a file keeps its name"])
        async with self._only_change():
            found = changes(self.running, wanted, self._started)
            result = Applied(changes=found, dry_run=dry_run)
            restarts = {c.role for c in found if c.action == "restart"}
            if restarts and (problems := await asyncio.to_thread(check_restartable, wanted)):
                raise loaded.error(problems)
            flips = {role: wish.ep.mode for role, wish in wanted.roles.items() if _only_flips(found, role)}
            planned = [await self._flip(role, mode, dry_run=True) for role, mode in flips.items()]
            if dry_run:
                return result.model_copy(update={"flips": planned})
            blocked = [c for c in found if c.action == "redeploy" or (c.action == "restart" and not restart)]
            if blocked:
                raise NeedsRestart(blocked)
            for role, mode in flips.items():
                result.flips.append(await self._flip(role, mode, dry_run=False))
            for role in self._role_names():
                if role in restarts:
                    self._started[role] = mode_of(self.running, role)  # if it comes up as it was
                    await self._restart(role, wanted, self.running)
                    self.running = _with_role(self.running, wanted, role)
                    self._started[role] = mode_of(wanted, role)
                    result.restarted.append(role)
            self.running = wanted
        return result

    async def _flip(self, role: RoleName, mode: ModeName, dry_run: bool) -> FlipResult:
        try:
            result = await self._try_flip(role, mode, dry_run)
        except RankFailed:
            self.outcomes[role, "failed"] += not dry_run
            raise
        self.outcomes[role, "applied"] += result.outcome == "applied"
        return result

    async def _try_flip(self, role: RoleName, mode: ModeName, dry_run: bool) -> FlipResult:
        ranks = self._ranks(role)
        statuses = await ranks.healthy()
        before = self._desired(role)
        result = FlipResult(role=role, before=before, mode=mode, outcome="unchanged", ranks=len(statuses))
        if mode == before and all(status.mode_desired == mode for status in statuses):
            return result
        if obstacles := [f"rank {status.rank}: {o}" for status in statuses if (o := status.graphs.obstacle)]:
            raise RankFailed([f"CUDA graphs of {role} cannot be captured anew: {line}" for line in obstacles], refused=True)
        captured = any(status.graphs.captured for status in statuses)
        if dry_run:
            if not captured:  # ranks with graphs check a mode where they drop them
                await ranks.check(mode)
            return result.model_copy(update={"outcome": "would apply"})
        used = {token for s in statuses for token in (s.flip.token, s.flip.agreed_token, s.graphs.token)}
        used.add(self._abandoned.get(role, 0))
        token, other = random.sample([token for token in range(1, 256) if token not in used], 2)
        started = time.monotonic()
        self._pending[role] = Pending(mode=mode, token=token)
        try:
            if captured:
                agreed = await self._drain(ranks, before, mode, (token, other))
            else:
                agreed = await self._agree(ranks, _Proposal(token, mode))
        finally:
            del self._pending[role]
        self.running = with_mode(self.running, role, mode)
        epoch = agreed[0].flip.agreed_epoch
        return result.model_copy(update={"outcome": "applied", "epoch": epoch, "seconds": round(time.monotonic() - started, 3)})

    async def _agree(self, ranks: Ranks, proposal: "_Proposal") -> list[RankStatus]:
        """Prepare on all, let steps happen, wait for all. RankFailed after withdrawing."""
        try:
            await ranks.prepare(proposal.token, proposal.mode)
            nudge = asyncio.create_task(self._nudge(ranks.role))
            try:
                return await self._agreed(ranks, proposal)
            finally:
                nudge.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await nudge
        except BaseException as failure:
            self._abandoned[ranks.role] = proposal.token
            with contextlib.suppress(RankFailed):  # a rank that does not answer cannot agree either
                await ranks.abandon(proposal.token)
            late = await ranks.statuses()
            if isinstance(failure, RankFailed) and all(map(proposal.runs, late)):
                return late
            raise

    async def _drain(self, ranks: Ranks, old: ModeName, new: ModeName, tokens: tuple[int, int]) -> list[RankStatus]:
        """For ranks whose CUDA graphs hold the mode."""
        target = self.running.target
        limits = Limits(drain_s=target.drain_timeout_s, capture_s=target.start_timeout_s)
        urls = [instance.url for instance in self._state().of(ranks.role) if instance.url]
        return await drain(VllmAdmin(urls, self._http), ranks, old, new, tokens, limits)

    async def _agreed(self, ranks: Ranks, proposal: "_Proposal") -> list[RankStatus]:
        deadline = time.monotonic() + self.running.control.flip_timeout_s
        while True:
            statuses = await ranks.statuses()
            waiting = [status for status in statuses if not proposal.runs(status)]
            if not waiting:
                return statuses
            if time.monotonic() > deadline or any(map(silence, waiting)):
                raise RankFailed(
                    [
                        f"{ranks.role} rank {rank} ({status.agent}) {_hindrance(status, proposal.mode)}"
                        for rank, status in enumerate(statuses)
                        if not proposal.runs(status)
                    ],
                    refused=False,
                )
            await asyncio.sleep(POLL_S)

    async def _nudge(self, role: RoleName) -> None:
        """An idle instance makes no steps, so ask it for a few tokens; whether it answers is seen by its ranks.

        Again and again, for the change may come with the last batch of the kind that runs the mode.
        """
        body = {"model": self.running.model.served_name, "prompt": PROMPT, "max_tokens": STEPS, "ignore_eos": True}
        state, traits = self._state(), dict(self.running.roles.items())[role].traits
        by_router = traits.bootstraps and role != "unified"
        urls = [state.url] if by_router else [instance.url for instance in state.of(role) if instance.url]
        limit = self.running.control.flip_timeout_s
        while urls:
            for url in urls:
                with contextlib.suppress(httpx.HTTPError):
                    await self._http.post(f"{url}/v1/completions", json=body, timeout=limit)
            await asyncio.sleep(POLL_S)

    async def _role_status(self, role: RoleName) -> RoleStatus:
        statuses = await self._ranks(role).statuses()
        if (waited := _starting_s(self._state().of(role))) > 0:
            # Nobody listens yet; what the system says of that would read like a fault.
            statuses = [s.model_copy(update={"error": f"starting for {waited:.0f} s"}) if s.error else s for s in statuses]
        desired, engine = self._desired(role), dict(self.running.roles.items())[role].engine
        executed = {status.mode_executed for status in statuses}
        both = serves_both_families(role, engine)
        return RoleStatus(
            role=role,
            engine=engine,
            mode_desired=desired,
            mode_executed=executed.pop() if len(executed) == 1 else None,
            allowed=self._reachable(role),
            pending=self._pending.get(role),
            drift=[f"rank {rank}: {drift}" for rank, s in enumerate(statuses) if (drift := _drift(s, desired, both))],
            ranks=statuses,
        )

    def _file_drift(self) -> tuple[list[Change], str | None]:
        try:
            return changes(self.running, load(self._file).deployment, self._started), None
        except Exception as error:  # whatever the file has become, the ranks go on and can be asked
            return [], str(error) if isinstance(error, DeploymentError) else f"{type(error).__name__}: {error}"

    @asynccontextmanager
    async def _only_change(self) -> AsyncIterator[None]:
        if self._change.locked():
            raise Busy(f"another change of {self.running.name} is under way; wait for it, or look at its status")
        state = self._state()
        if state.phase == "starting":
            raise Busy(f"{state.name} is starting for {_starting_s(state.instances):.0f} s; try again once it serves")
        async with self._change:
            yield

    def _desired(self, role: RoleName) -> ModeName:
        return mode_of(self.running, role)

    def _reachable(self, role: RoleName) -> list[str]:
        return reachable(self.running, role, self._started[role])

    def _role_names(self) -> list[RoleName]:
        return [role for role, _ in self.running.roles.items()]

    def _ranks(self, role: RoleName) -> Ranks:
        agents = [agent for instance in self._state().of(role) for agent in instance.agents]
        return Ranks(role, agents, self.running.control.key, self._http)


@dataclass(frozen=True)
class _Proposal:
    """A change under way; with the dispatches that each rank had done in the new mode when it was first seen to agree."""

    token: int
    mode: ModeName
    done: dict[int, int] = field(default_factory=dict)

    def runs(self, status: RankStatus) -> bool:
        """The rank agreed, and a dispatch since then ran the mode. The last one may be of a batch that takes another mode."""
        if status.error is not None or status.flip.agreed_token != self.token:
            return False
        # A dispatch is counted when it starts, and has been executed when its combine starts.
        now = status.modes[self.mode].combines if self.mode in status.modes else 0
        before = self.done.setdefault(status.rank, now)
        return self.mode in (status.mode_executed, "auto") or now > before


def _starting_s(instances: list[InstanceState]) -> float:
    """For how long those that do not serve yet have been starting."""
    return max((instance.starting_s or 0.0 for instance in instances), default=0.0)


def _hindrance(status: RankStatus, mode: ModeName) -> str:
    if status.error is not None:
        return f"did not answer ({status.error})"
    if silent := silence(status):
        return silent
    if status.mode_desired == mode:
        return f"agreed, but executed {status.mode_executed}, not {mode}, in time"
    return f"made no dispatch that all ranks proposed {mode} in within the time, its last epoch is {status.epoch}"


def _drift(status: RankStatus, desired: ModeName, both_families: bool) -> str | None:
    if status.error is not None:
        return f"does not answer ({status.error})"
    if silent := silence(status):
        return silent
    if status.mode_desired != desired:
        return f"is set to {status.mode_desired}, not {desired}"
    if desired != "auto" and status.mode_executed not in (None, desired) and not both_families:
        return f"executed {status.mode_executed}, not {desired}"
    return None


def _only_flips(found: list[Change], role: RoleName) -> bool:
    actions = {change.action for change in found if change.role == role}
    return actions == {"flip"}


def _with_role(running: Deployment, wanted: Deployment, role: RoleName) -> Deployment:
    roles = running.roles.model_copy(update={role: dict(wanted.roles.items())[role]})
    return running.model_copy(update={"roles": roles})
