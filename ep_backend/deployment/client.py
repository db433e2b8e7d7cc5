"""Sends prompts to a deployment as any client would."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

from ep_backend.deployment.state import RunState

TIMEOUT_S = 300.0
LONGEST = 200


def chat(state: RunState, prompt: str, max_tokens: int) -> str:
    """The answer to one user message, greedy."""
    messages = [{"role": "user", "content": prompt}]
    choice = _post(state, "/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens})
    return str(choice["message"]["content"])


def complete(state: RunState, prompt: str, tokens: int) -> list[int]:
    """The ids of exactly so many tokens that continue a prompt, greedy."""
    return list(stream(state, prompt, tokens))


def stream(state: RunState, prompt: str, tokens: int) -> Iterator[int]:
    """The same, each token when it comes."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, "stream": True}
    url, sent = f"{state.url}/v1/completions", _greedy(state, body)
    with httpx.stream("POST", url, json=sent, timeout=TIMEOUT_S, trust_env=False) as response:
        if response.is_error:
            response.read()
        _raise_for_status(response)
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                if "choices" not in event:
                    raise httpx.RemoteProtocolError(f"the answer broke off: {line}")
                yield from event["choices"][0]["token_ids"]


def _post(state: RunState, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{state.url}{route}", json=_greedy(state, body), timeout=TIMEOUT_S, trust_env=False)
    _raise_for_status(response)
    try:
        choice: dict[str, Any] = response.json()["choices"][0]
    except (ValueError, LookupError, TypeError):
        raise httpx.RemoteProtocolError(f"what answers at {state.url} is no engine: {_beginning(response.text)}") from None
    return choice


def _greedy(state: RunState, body: dict[str, Any]) -> dict[str, Any]:
    return {"model": state.served_name, "temperature": 0, **body}


def _raise_for_status(response: httpx.Response) -> None:
    if response.is_error:  # the engine's own words, not httpx's
        raise httpx.HTTPStatusError(
            f"status {response.status_code}: {_reason(response)}", request=response.request, response=response
        )


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return _beginning(response.text) or response.reason_phrase


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
