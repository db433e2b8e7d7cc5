"""Sends prompts to a deployment as any client would."""

from typing import Any

import httpx

from ep_backend.deployment.state import RunState

TIMEOUT_S = 300.0


def chat(state: RunState, prompt: str, max_tokens: int) -> str:
    """The answer to one user message, greedy."""
    messages = [{"role": "user", "content": prompt}]
    choice = _post(state, "/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens})
    return str(choice["message"]["content"])


def complete(state: RunState, prompt: str, tokens: int) -> list[int]:
    """The ids of exactly so many tokens that continue a prompt, greedy."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    choice = _post(state, "/v1/completions", body)
    return [int(token) for token in choice["token_ids"]]


def _post(state: RunState, route: str, body: dict[str, Any]) -> dict[str, Any]:
    everywhere = {"model": state.served_name, "temperature": 0}
    response = httpx.post(f"{state.url}{route}", json={**everywhere, **body}, timeout=TIMEOUT_S)
    if response.is_error:  # the engine's own words, not httpx's
        raise httpx.HTTPStatusError(
            f"status {response.status_code}: {_reason(response)}", request=response.request, response=response
        )
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text.strip() or response.reason_phrase
