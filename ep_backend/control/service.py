"""The control service's HTTP face."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from pydantic import AfterValidator

from ep_backend.control.audit import Audit
from ep_backend.control.controller import Busy, Controller, NeedsRestart, NotAllowed, Restart, RestartFailed
from ep_backend.control.metrics import Control, Ranks, exposition
from ep_backend.control.models import Answer, Applied, AuditEntry, DeploymentStatus, FlipResult
from ep_backend.control.ranks import RankFailed
from ep_backend.deployment.client import chat
from ep_backend.deployment.load import Loaded
from ep_backend.deployment.problems import DeploymentError
from ep_backend.deployment.state import RunState
from ep_backend.files import MOST_BYTES
from ep_backend.serving import Background, Bounded, needs_key, require_key, require_own_name
from ep_backend.values import Positive

PAGE = Path(__file__).with_name("page.html")
# The page is one file and asks this service only.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'"
)


def _in_utf8(text: str) -> str:
    """JSON can spell half of a character; nothing here could pass it on."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_in_utf8)]
DryRun = Annotated[bool, Query(description="say what would happen, after asking every rank; change nothing")]


def start_service(loaded: Loaded, state: Callable[[], RunState], restart: Restart, audit: Audit) -> Background:
    """The service of a deployment, in a thread of this process; ValueError if it must not or cannot listen."""
    control = loaded.deployment.control
    require_key(control.key, setting="control.", host=control.host)
    app = make_app(Controller(loaded, state, restart), state, audit, control.host, control.key)
    return Background(app, name="control service", setting="control.", host=control.host, port=control.port or 0)


def make_app(controller: Controller, state: Callable[[], RunState], audit: Audit, host: str, key: str | None) -> FastAPI:
    app = FastAPI(title="ep_backend control service", version="1")
    require_own_name(app, host)
    app.add_middleware(Bounded, most=MOST_BYTES)
    _explain_errors(app)

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html", headers={"Content-Security-Policy": PAGE_POLICY})

    api = APIRouter(dependencies=[Depends(needs_key(key))])

    @asynccontextmanager
    async def noted(request: Request, action: str, what: str) -> AsyncIterator[None]:
        """Leaves a line about a change in the audit log, however it ends."""
        client = request.client.host if request.client else "?"
        try:
            yield
        except Exception as error:
            audit.note(client, action, what, f"{type(error).__name__}: {error}")
            raise
        audit.note(client, action, what, "done")

    @api.get("/v1/status")
    async def status() -> DeploymentStatus:
        """Every role and rank: mode desired and executed, epoch, counters, pending change; and what drifted."""
        return await controller.status()

    @api.post("/v1/roles/{role}/mode", dependencies=[Depends(_json)])
    async def set_mode(
        request: Request, role: str, mode: Annotated[Text, Body(embed=True)], dry_run: DryRun = False
    ) -> FlipResult:
        """Flip a role inside its family, on every rank at the same step or on none."""
        async with noted(request, "dry run of a flip" if dry_run else "flip", f"{role} to {mode}"):
            return await controller.flip(role, mode, dry_run)

    @api.post("/v1/deployment", openapi_extra={"requestBody": {"required": True, "content": {"application/yaml": {}}}})
    async def apply(
        request: Request,
        dry_run: DryRun = False,
        restart: Annotated[bool, Query(description="restart roles where a change needs it")] = False,
    ) -> Applied:
        """Make the deployment what a whole file says."""
        text = await _yaml(request)
        async with noted(request, "dry run of a file" if dry_run else "file", f"{len(text)} characters"):
            return await controller.apply(text, dry_run, restart)

    @api.post("/v1/ask", dependencies=[Depends(_json)])
    def ask(prompt: Annotated[Text, Body()], max_tokens: Annotated[Positive, Body()] = 32) -> Answer:
        """Send one prompt through the deployment, as a client would."""
        return Answer(answer=chat(state(), prompt, max_tokens))

    @api.get("/v1/audit")
    def entries() -> list[AuditEntry]:
        """The latest changes asked for, oldest first."""
        return audit.entries()

    @api.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        """Every rank's counters, and this service's own, for Prometheus."""
        now = await controller.status()
        ranks = [rank.model_dump() for role in now.roles for rank in role.ranks if rank.error is None]
        drift = {"file": len(now.drift), "rank": sum(len(role.drift) for role in now.roles)}
        return exposition(Ranks(ranks), Control(controller.outcomes, drift))

    app.include_router(api)
    return app


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _json(request: Request) -> None:
    """As curl's -d does not say it: what says to be a form is not read, and every field of it would be missing."""
    kind = _content_type(request)
    if kind != "application/json":
        raise HTTPException(415, f"content type {kind!r} is no JSON; send application/json (curl --json, or with -H)")


async def _yaml(request: Request) -> str:
    kind = _content_type(request)
    if kind not in ("application/yaml", "application/x-yaml", "text/yaml"):
        raise HTTPException(415, f"content type {kind!r} is no file; send application/yaml")
    try:
        return (await request.body()).decode()
    except UnicodeDecodeError as error:
        raise HTTPException(422, f"the file is not UTF-8: {error}") from None


def _explain_errors(app: FastAPI) -> None:
    def answers(kind: type[Exception], reply: Callable[[Any], tuple[int, dict[str, Any]]]) -> None:
        @app.exception_handler(kind)
        def handle(_: Request, error: Exception) -> JSONResponse:
            code, more = reply(error)
            return JSONResponse({"detail": str(error), **more}, code)

    @app.exception_handler(RequestValidationError)
    def explain(_: Request, error: RequestValidationError) -> JSONResponse:
        """Without the values given: not every one can be sent back, as half of a surrogate pair."""
        return JSONResponse({"detail": [{key: fault[key] for key in ("loc", "msg")} for fault in error.errors()]}, 422)

    @app.exception_handler(Exception)
    def own_fault(_: Request, error: Exception) -> JSONResponse:
        """Said as any other answer is; its traceback goes to the log."""
        return JSONResponse({"detail": f"the control service failed: {type(error).__name__}: {error}"}, 500)

    answers(Busy, lambda _: (409, {}))
    answers(NotAllowed, lambda error: (422, {"allowed": error.allowed}))
    answers(NeedsRestart, lambda error: (409, {"blocked": [change.model_dump() for change in error.blocked]}))
    answers(RankFailed, lambda error: (409 if error.refused else 504, {}))
    answers(RestartFailed, lambda _: (502, {}))
    answers(httpx.HTTPError, lambda _: (502, {}))
    answers(DeploymentError, lambda error: (422, {"lines": error.lines}))
