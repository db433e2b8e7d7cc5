#!/usr/bin/env python3
"""Stands for `vllm` and `vllm-router`: the same flags, health and status routes, processes and shared memory, no model.

FAKE_DIES makes the engine of that role end while loading.
"""

import json
import multiprocessing
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def serve(port: int, answers: dict[str, Any]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(answers.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/flip/prepare":  # every rank of a fake engine agrees at once
                flip = {"agreed_token": body["token"], "agreed_epoch": 3, "flips": 1}
                answers["/status"].update(mode_desired=body["mode"], mode_executed=body["mode"], flip=flip)
            self.reply({"choices": [{"message": {"content": "fine"}, "token_ids": [1, 2]}]})

        def reply(self, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def serve_rank(settings: dict[str, object], rank: int, ranks: int) -> None:
    counters = {"dispatches": 3, "combines": 3, "records": {"scale_up": 5}, "bytes": {"scale_up": 5120}}
    status = {
        **{"deployment": settings["deployment"], "role": settings["role"], "rank": rank, "world_size": ranks},
        **{"engine": "fake", "pid": os.getpid(), "mode_desired": settings["mode"], "mode_executed": settings["mode"]},
        **{"epoch": 3, "failed": None, "modes": {settings["mode"]: counters}},
    }
    serve(int(str(settings["agent_port"])) + rank, {"/status": status})


def main() -> None:
    if Path(sys.argv[0]).name == "vllm-router":
        serve(int(flag("--port")), {"/health": {}})
    if sys.argv[1] == "-c":  # asked, as a Python, for the versions of SGLang and ep-backend
        print("0.5.23 0.1.0")
        return
    settings = json.loads(Path(os.environ["EP_BACKEND_SETTINGS"]).read_text())
    if os.environ.get("FAKE_DIES") == settings["role"]:
        print("INFO loading", "ValueError: the weights are not there", "INFO bye", sep="\n")
        sys.exit(3)
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=4096, name=f"fake_{os.getpid()}")
    ranks = int(flag("--tp-size" if "sglang.launch_server" in sys.argv else "--data-parallel-size"))
    for rank in range(ranks):
        multiprocessing.Process(target=serve_rank, args=(settings, rank, ranks)).start()
    time.sleep(0.5)
    print("INFO serving", shared.name, flush=True)
    serve(int(flag("--port")), {"/health": {}})


if __name__ == "__main__":
    import multiprocessing.shared_memory

    main()
