"""An engine within the test's own process, for tests of the client: every answer is a function that the test sets."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]


class AnsweringEngine(ThreadingHTTPServer):
    """An engine in this process whose answers a test decides.

    Attributes:
        requests: what was asked for, in order.
        answer: (status, body) for a request; status 0 hangs up.
        stream: the events of a streamed answer.
        metrics: the page ``/metrics``.
        release: set at the end, for answers that wait.
        connections: how many were opened.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], Reply] = lambda payload: (200, completion(payload))
        self.stream: Callable[[dict[str, Any]], Iterator[dict[str, Any]]] = pieces
        self.metrics = ""
        self.release = threading.Event()
        self.connections = 0
        self._sockets: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        """Count connections."""
        opened, address = super().get_request()
        self.connections += 1
        self._sockets.append(opened)
        return opened, address

    def hang_up(self) -> None:
        """End every connection, as a server does with those that nobody has used for long."""
        for opened in self._sockets:
            with suppress(OSError):  # it ended already
                opened.shutdown(socket.SHUT_RDWR)
        self._sockets = []

    def handle_error(self, *_: object) -> None:
        """A client that hung up is what some tests are about."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """Hands every request to the engine's own rules."""

    protocol_version = "HTTP/1.1"
    server: AnsweringEngine

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._send(200, self.server.metrics.encode())

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(payload)
        if payload.get("stream"):
            events = [f"data: {json.dumps(event)}\n\n" for event in self.server.stream(payload)] + ["data: [DONE]\n\n"]
            self._send(200, "".join(events).encode())
        else:
            status, body = self.server.answer(payload)
            if status == 0:
                self.close_connection = True
                return
            self._send(status, json.dumps(body).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def completion(payload: dict[str, Any], **more: Any) -> dict[str, Any]:
    """vLLM's answer of three tokens; ``more`` is added to it, ``choice`` to its choice."""
    choice = {"prompt_token_ids": payload["prompt"], "token_ids": [7, 8, 2], "finish_reason": "stop"}
    return {"choices": [choice | more.pop("choice", {})], **more}


def pieces(payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """vLLM's streamed answer of five tokens in three events."""
    yield {"choices": [{"token_ids": [5], "prompt_token_ids": payload["prompt"], "finish_reason": None}]}
    yield {"choices": [{"token_ids": [6, 7, 8], "finish_reason": None}]}
    yield {"choices": [{"token_ids": [2], "finish_reason": "stop"}]}


@contextmanager
def answering() -> Iterator[AnsweringEngine]:
    """An engine that serves; vLLM's answers until the test sets others."""
    with AnsweringEngine() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.release.set()
            server.shutdown()
