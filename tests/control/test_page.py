"""The status page in a real browser: what it shows, and a flip by a click."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.control.browser import PROGRAM, browser
from tests.control.conftest import FILE, KEY, Service
from tests.control.instance import instance

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on PATH; apt-get install chromium")
RATES = "[...document.querySelectorAll('#role-prefill polyline[data-path=scale_up]')].map(l => l.getAttribute('points'))[0]"


def test_the_page_shows_and_flips(ranks: Any, service: Callable[..., Service], tmp_path: Path) -> None:
    shots = Path(os.environ.get("EP_BACKEND_SCREENSHOTS", tmp_path))
    with (
        instance(ranks(4), "prefill", "direct", tmp_path / "stop prefill", busy=True) as prefill,
        instance(ranks(2), "decode", "low_latency", tmp_path / "stop decode", busy=True) as decode,
    ):
        control = service(prefill=prefill, decode=decode)
        with browser(tmp_path / "profile", f"{control.client.base_url}/") as page:
            page.wait("document.getElementById('login')?.hidden === false")
            assert "a key is needed here" in page.js("document.getElementById('message').textContent")
            page.js(f"document.getElementById('key').value = {KEY!r}; document.querySelector('#login button').click()")
            page.wait("document.getElementById('role-decode') && document.getElementById('login').hidden")

            heat = "[...document.querySelectorAll('#role-prefill .heat td')].map(cell => Number(cell.textContent))"
            page.wait(f"Math.max(...{heat}) > 0")
            assert len(page.js(heat)) == 16
            page.js("[...document.querySelectorAll('#role-prefill button')].find(b => b.textContent == 'normal').click()")
            page.wait("document.getElementById('role-prefill').textContent.includes('executed: normal')")
            assert control.role("prefill")["mode_desired"] == "normal"
            assert page.js("document.querySelector('#role-prefill button[aria-pressed=true]').textContent") == "normal"
            assert "roles.prefill.ep.mode: direct, running: normal (flip)" in page.wait(
                "document.getElementById('drift').textContent"
            )
            points = page.wait(f"{RATES}.split(' ').length >= 3 && {RATES}")
            heights = [float(point.partition(",")[2]) for point in points.split()]
            assert min(heights) < 120, "no bytes per second above zero, which is at 132"
            page.screenshot(shots / "page.png")

            control.file.write_text(FILE.replace("mode: low_latency", "mode: slow"))
            page.wait("document.getElementById('drift').textContent.includes('roles.decode.ep.mode')")
            assert page.js("document.getElementById('message').textContent") == ""
