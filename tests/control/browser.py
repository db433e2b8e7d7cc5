"""A headless Chromium, driven through its debugging protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run")
TIMEOUT_S = 60.0


class Page:
    """One tab."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Its value once it is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := self.js(expression)):
            assert time.monotonic() < deadline, f"not true: {expression}\n{self.js('document.body.innerText')}"
            time.sleep(0.1)
        return value

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._connection.recv(timeout=TIMEOUT_S))
            if answer.get("id") == number:
                return answer["result"]


@contextmanager
def browser(profile: Path, url: str) -> Iterator[Page]:
    assert PROGRAM is not None
    command = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "--window-size=1240,1500", "--remote-debugging-port=0", url]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with connect(_tab(profile, url), max_size=None) as connection:
            yield Page(connection)
    finally:
        child.terminate()
        child.wait(10)


def _tab(profile: Path, url: str) -> str:
    """The address of the tab that shows the url."""
    deadline = time.monotonic() + TIMEOUT_S
    place = profile / "DevToolsActivePort"
    while time.monotonic() < deadline:
        if place.exists() and (lines := place.read_text().splitlines()):
            tabs = httpx.get(f"http://127.0.0.1:{lines[0]}/json", timeout=TIMEOUT_S).json()
            found = [tab for tab in tabs if tab["type"] == "page" and tab["url"].startswith(url.partition("#")[0])]
            if found:
                return str(found[0]["webSocketDebuggerUrl"])
        time.sleep(0.1)
    raise AssertionError(f"chromium has shown no tab within {TIMEOUT_S:g} s")
