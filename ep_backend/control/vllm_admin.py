"""vLLM's admin routes, which it has only with VLLM_SERVER_DEV_MODE=1: see :class:`ep_backend.control.drain.Engine`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import httpx

from ep_backend.control.drain import EngineFailed
from ep_backend.deployment.schema import ModeName

METHOD = "ep_recapture"  # of the worker extension that the plug-in adds; see server_plugins/vllm/graphs.py
RETRY_S = 0.5


class VllmAdmin:
    """The instances of one role by their base addresses. A call reaches every engine of an instance, on all its nodes."""

    def __init__(self, urls: Sequence[str], http: httpx.AsyncClient) -> None:
        self._urls = urls
        self._http = http

    async def pause(self, limit_s: float) -> None:
        # "wait": requests inside finish. Caches go with them, for captures write to blocks that no request holds.
        await self._all("/pause", limit_s, params={"mode": "wait", "clear_cache": "true"})

    async def resume(self, limit_s: float) -> None:
        """A pause under way cannot be called off: the engine refuses until it has come about."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return await self._all("/resume", limit_s)
            except EngineFailed:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)

    async def recapture(self, token: int, mode: ModeName, limit_s: float) -> None:
        await self._all("/collective_rpc", limit_s, json={"method": METHOD, "args": [str(token), mode]})

    async def _all(self, route: str, limit_s: float, **request: object) -> None:
        answers = await asyncio.gather(*(self._ask(url, route, limit_s, request) for url in self._urls))
        if faults := [answer for answer in answers if answer]:
            raise EngineFailed("; ".join(faults))

    async def _ask(self, url: str, route: str, limit_s: float, request: dict[str, object]) -> str | None:
        """Why it failed, or None."""
        try:
            response = await self._http.post(f"{url}{route}", timeout=limit_s, **request)  # type: ignore[arg-type]
        except httpx.TimeoutException:
            return f"{url}{route} took more than {limit_s:g} s"
        except httpx.HTTPError as error:
            return f"{url}{route} does not answer ({type(error).__name__})"
        if response.status_code == 404:
            return f"{url} has no {route}: start the role with env VLLM_SERVER_DEV_MODE=1, at an address that only you reach"
        return None if response.is_success else f"{url}{route} answered {response.status_code}: {response.text[:300]}"
