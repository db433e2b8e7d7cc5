#!/usr/bin/env python3
"""Stands for `vllm` and `vllm-router`: the same flags, health and status routes, processes and shared memory, no model.

FAKE_DIES makes the engine of that role end while loading, FAKE_LOADS_S lets it load that long, FAKE_SHUTS_DOWN lets it end
with status 0 when a rank has died, FAKE_SPLITS is the share of batches that it runs as two. An answer with log-probabilities
counts as a dispatch of every rank. A prompt of more than 100 words is refused as vLLM refuses one that is too long.
"""

import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

answered = multiprocessing.Value("q", 0)  # by the engine, for its ranks


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def serve(host: str, port: int, answers: dict[str, Any]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/status":
                done = answered.value
                answers["/status"]["lane_rounds"] = [3 + done, int(done * float(os.environ.get("FAKE_SPLITS", "0")))]
                next(iter(answers["/status"]["modes"].values()))["dispatches"] = 3 + done
            self.reply(answers.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/flip/prepare":  # every rank of a fake engine agrees at once
                flip = {"agreed_token": body["token"], "agreed_epoch": 3, "flips": 1}
                status = answers["/status"]
                status.update(mode_desired=body["mode"], mode_executed=body["mode"], flip=flip)
                status["modes"] = {body["mode"]: next(iter(status["modes"].values()))}
            words = body["messages"][0]["content"].split() if "messages" in body else []
            if len(words) > 100:
                error = {"message": f"This model's maximum context length is 100 tokens, you asked for {len(words)}."}
                return self.reply({"error": error}, 400)
            choice: dict[str, Any] = {"message": {"content": "fine"}, "token_ids": [1, 2]}
            if "logprobs" in body:
                with answered.get_lock():
                    answered.value += 1
                count = body["max_tokens"]
                best = {"token_id:1": -0.1, "token_id:2": -3.0}
                choice |= {"token_ids": [1] * count}
                choice |= {"logprobs": {"token_logprobs": [-0.1] * count, "top_logprobs": [best] * count}}
            self.reply({"choices": [choice]})

        def reply(self, content: object, status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(404 if content is None else status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer.request_queue_size = 64  # a measurement asks many questions at once
    ThreadingHTTPServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ThreadingHTTPServer((host, port), Handler).serve_forever()


def serve_rank(settings: dict[str, object], rank: int, ranks: int) -> None:
    counters = {"dispatches": 3, "combines": 3, "records": {"scale_up": 5}, "bytes": {"scale_up": 5120}}
    status = {
        **{"deployment": settings["deployment"], "role": settings["role"], "rank": rank, "world_size": ranks},
        **{"engine": "fake", "pid": os.getpid(), "mode_desired": settings["mode"], "mode_executed": settings["mode"]},
        **{"epoch": 3, "failed": None, "modes": {settings["mode"]: counters}},
    }
    serve(str(settings["agent_host"]), int(str(settings["agent_port"])) + rank, {"/status": status})


def end_with(processes: list[multiprocessing.Process]) -> None:
    """As vLLM's API server does: says which engine core died, and ends with status 0."""
    sentinels = [process.sentinel for process in processes]
    dead = sentinels.index(multiprocessing.connection.wait(sentinels)[0])
    print(
        f"(APIServer pid={os.getpid()}) ERROR 11-29 10:00:00 [utils.py:601] "
        f"Engine core process EngineCore_DP{dead} died unexpectedly."
    )
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    if Path(sys.argv[0]).name == "vllm-router":
        serve(flag("--host"), int(flag("--port")), {"/health": {}})
    if sys.argv[1] == "-c":  # asked, as a Python, for the versions of SGLang and ep-backend
        print("0.5.23 0.1.0")
        return
    settings = json.loads(Path(os.environ["EP_BACKEND_SETTINGS"]).read_text())
    if os.environ.get("FAKE_DIES") == settings["role"]:
        print("INFO loading", "ValueError: the weights are not there", "INFO bye", sep="\n")
        sys.exit(3)
    multiprocessing.resource_tracker.ensure_running()  # else a signal while it starts leaves the memory behind
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=4096, name=f"fake_{os.getpid()}")
    ranks = int(flag("--tp-size" if "sglang.launch_server" in sys.argv else "--data-parallel-size"))
    processes = [multiprocessing.Process(target=serve_rank, args=(settings, rank, ranks)) for rank in range(ranks)]
    for process in processes:
        process.start()
    if "FAKE_SHUTS_DOWN" in os.environ:
        threading.Thread(target=end_with, args=(processes,), daemon=True).start()
    time.sleep(float(os.environ.get("FAKE_LOADS_S", "0.5")))
    print("INFO serving", shared.name, flush=True)
    serve(flag("--host"), int(flag("--port")), {"/health": {}})


if __name__ == "__main__":
    import multiprocessing.connection
    import multiprocessing.resource_tracker
    import multiprocessing.shared_memory

    main()
