"""The door before a router: what it passes on, who waits, and that it counts who is inside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from ep_backend.control.door import Door
from ep_backend.serving import Background


class Router:
    """Answers with what it was asked, or with words one after another as the test lets them go."""

    def __init__(self) -> None:
        self.words = threading.Semaphore(0)
        self.cut = threading.Event()
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/stream":
                    return self.stream()
                if self.path == "/broken":
                    self.send_response(200)
                    self.send_header("Content-Length", "100")
                    self.end_headers()
                    return None
                self.send_response(418)
                self.send_header("X-Asked", f"{self.path} {self.headers['X-Mine']}")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def stream(self) -> None:
                self.send_response(200)
                self.end_headers()
                try:
                    for number in range(1000):
                        assert router.words.acquire(timeout=20)
                        self.wfile.write(f"word {number}\n".encode())
                        self.wfile.flush()
                except OSError:
                    router.cut.set()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def door() -> Door:
    return Door(wait_s=20.0)


@pytest.fixture
def url(door: Door) -> Iterator[str]:
    server = Background(door, name="door", setting="router.", host="127.0.0.1", port=0)
    yield f"http://127.0.0.1:{server.port}"
    server.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_requests_and_answers_pass_unchanged(door: Door, url: str, router: Router) -> None:
    door.target = router.url
    content = bytes(range(256)) * 4000
    answer = httpx.post(f"{url}/v1/some%20thing?a=1&b=%2F", content=content, headers={"X-Mine": "kept"}, timeout=20)
    assert (answer.status_code, answer.content) == (418, content)
    assert answer.headers["X-Asked"] == "/v1/some%20thing?a=1&b=%2F kept"
    assert door.inside == 0


def test_words_pass_as_they_come(door: Door, url: str, router: Router) -> None:
    door.target = router.url
    with httpx.stream("POST", f"{url}/stream", content=b"x", timeout=20) as answer:
        lines = answer.iter_lines()
        for number in range(3):
            router.words.release()
            assert next(lines) == f"word {number}"
        assert door.inside == 1
    # The client has gone: so has the request behind the door.
    wait_for(lambda: door.inside == 0)

    def cut() -> bool:
        router.words.release()
        return router.cut.is_set()

    wait_for(cut)


def test_a_broken_answer_breaks_off(door: Door, url: str, router: Router) -> None:
    door.target = router.url
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{url}/broken", content=b"x", timeout=20)
    assert door.inside == 0


def test_everybody_waits_while_it_is_closed(door: Door, url: str, router: Router) -> None:
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(httpx.post, f"{url}/{n}", content=b"x", timeout=20) for n in range(8)]
        time.sleep(0.5)
        assert door.inside == 0 and not any(request.done() for request in waiting)
        door.target = router.url
        assert {request.result().headers["X-Asked"] for request in waiting} == {f"/{n} None" for n in range(8)}


def test_nobody_waits_for_ever() -> None:
    door = Door(wait_s=0.2)
    server = Background(door, name="door", setting="router.", host="127.0.0.1", port=0)
    answer = httpx.post(f"http://127.0.0.1:{server.port}/", content=b"x", timeout=20)
    assert (answer.status_code, answer.text) == (503, "the deployment has not come back within 0.2 s\n")
    door.target = "http://127.0.0.1:9"
    answer = httpx.post(f"http://127.0.0.1:{server.port}/", content=b"x", timeout=20)
    assert answer.status_code == 502 and "http://127.0.0.1:9 does not answer" in answer.text
    server.stop()
