"""The command line's side of the control service."""

from types import TracebackType
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from ep_backend.control.models import Answer, Applied, DeploymentStatus
from ep_backend.deployment.load import Loaded
from ep_backend.deployment.state import RunState

Model = TypeVar("Model", bound=BaseModel)
MARGIN_S = 60.0  # on top of what the service itself may wait


class ControlFailed(Exception):
    """The service refused, or did not do it; the message is its own."""


class ControlClient:
    """Asks the service of a running deployment."""

    def __init__(self, state: RunState) -> None:
        self._url = state.control_url or ""
        headers = {"Authorization": f"Bearer {state.key}"} if state.key else {}
        self._http = httpx.Client(base_url=self._url, headers=headers, timeout=MARGIN_S, trust_env=False)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def status(self) -> DeploymentStatus:
        return self._ask(DeploymentStatus, "GET", "/v1/status")

    def apply(self, loaded: Loaded, *, dry_run: bool, restart: bool) -> Applied:
        """Make the deployment what a file says."""
        wanted = loaded.deployment
        roles, target = len(wanted.roles.items()), wanted.target
        limit = MARGIN_S + roles * wanted.control.flip_timeout_s
        # A restart that fails is undone by another one, and so is a capture of graphs.
        limit += 2 * roles * (target.drain_timeout_s + target.stop_timeout_s + target.start_timeout_s)
        return self._ask(
            Applied,
            "POST",
            "/v1/deployment",
            params={"dry_run": dry_run, "restart": restart},
            content=loaded.text.encode(),
            headers={"Content-Type": "application/yaml"},
            timeout=limit,
        )

    def ask(self, prompt: str, max_tokens: int) -> str:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ControlFailed("the prompt is no text in UTF-8; send it in that encoding") from None
        body = {"prompt": prompt, "max_tokens": max_tokens}
        return self._ask(Answer, "POST", "/v1/ask", json=body, timeout=300.0 + MARGIN_S).answer

    def _ask(self, kind: type[Model], method: str, route: str, **options: Any) -> Model:
        try:
            response = self._http.request(method, route, **options)
        except httpx.HTTPError as error:
            raise ControlFailed(f"the control service at {self._url} does not answer: {error}") from None
        try:
            if response.is_success:
                return kind.model_validate(response.json())
            detail = str(response.json()["detail"])
        except (ValueError, KeyError, TypeError):
            form = response.headers.get("content-type", "no content type")
            raise ControlFailed(
                f"what answers at {self._url} is no control service of this version (status {response.status_code}, {form}); "
                "end it, or start the deployment anew"
            ) from None
        raise ControlFailed(detail)
