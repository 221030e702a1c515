"""An HTTP front in the shape that speculators' own client of hidden states speaks, before any extractor.

speculators 0.9.0 gets hidden states from vLLM only: ``generate-offline-data`` and ``train --on-missing generate`` take
the first model of ``GET /v1/models``, send ``POST /v1/completions`` with token ids, ``max_tokens`` 1 and
``return_token_ids``, compare ``choices[0].prompt_token_ids`` with what they sent, and read the file named in
``kv_transfer_params.hidden_states_path``, which they move or delete (read in its data_generation/vllm_client.py,
cli/generate_offline_data.py and train/data.py). With this front the same commands work on SGLang's states, checked
and in the pipeline's convention: the final slot goes through the target's own norm as vLLM's does.

The file is complete before the answer, so there is no lock to wait for; a client that went away leaves none.
"""

import json
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from safetensors.torch import save_file

from infra.engines.client.client import RequestRefused
from infra.engines.client.extraction import States
from infra.errors import EngineError

LONGEST_BODY = 64 << 20
"""Bytes; a million token ids take 8 MB."""
WAITING_FACTOR = 8
"""Requests that may wait, as a multiple of those that are worked on; more are told to come again."""
IDLE_SECONDS = 120.0


class Source(Protocol):
    """What gives the states: :class:`infra.engines.client.extraction.Extractor` is one."""

    def extract(self, token_ids: Sequence[int]) -> States:
        """States of every token, checked; raises RequestRefused or another EngineError."""
        ...


class HttpFault(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        sentence: what is wrong, for the person at the other end.
    """

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class Front:
    """Serves a source of states on a loopback port until the ``with`` block ends.

    Args:
        source: gives the states; is called from several threads.
        model: the one model served; speculators compares it with the path given as target.
        vocab_size: ids at or above are refused.
        folder: where the files go; created, and emptied at the end. Clients must see it at the same path.
        concurrency: most extractions at once.
        port: 0 takes a free one.
        healthy: raises EngineError when the engine behind is not well; asked by ``GET /health``.

    Raises:
        EngineError: the port is taken.
    """

    def __init__(
        self,
        source: Source,
        model: str,
        vocab_size: int,
        folder: Path,
        *,
        concurrency: int = 32,
        port: int = 0,
        healthy: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.vocab_size, self.folder = model, vocab_size, folder.resolve()
        self.served = 0
        self._source, self._healthy = source, healthy
        self._room = threading.BoundedSemaphore(concurrency)
        self._admitted = threading.BoundedSemaphore((1 + WAITING_FACTOR) * concurrency)
        self._lock = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clear()
        try:
            self._server = _Listener(("127.0.0.1", port), type("Handler", (_Handler,), {"front": self}))
        except OSError as error:
            raise EngineError(
                f"the front cannot listen on port {port}: {error.strerror}",
                fix="name another port, or 0 for a free one",
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="front", daemon=True)

    @property
    def address(self) -> str:
        """Base URL, without ``/v1``."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def check(self) -> None:
        """Raises EngineError when the engine behind is not well."""
        if self._healthy is not None:
            self._healthy()

    def answer(self, asked: Any, gone: Callable[[], bool]) -> tuple[dict[str, Any], Path]:
        """A completion request's answer, and the file of states that it names.

        Args:
            gone: whether the client has given up meanwhile.

        Raises:
            HttpFault: the request is wrong, there is no room, or the engine failed.
            ConnectionAbortedError: the client gave up; nothing is left of its request.
        """
        tokens = self._tokens(asked)
        if not self._admitted.acquire(blocking=False):
            raise HttpFault(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests wait already; send fewer at once")
        try:
            with self._room:
                if gone():
                    raise ConnectionAbortedError
                states = self._source.extract(tokens)
        except RequestRefused as error:
            raise HttpFault(HTTPStatus.BAD_REQUEST, str(error)) from error
        except EngineError as error:
            raise HttpFault(HTTPStatus.BAD_GATEWAY, str(error)) from error
        finally:
            self._admitted.release()
        if gone():
            raise ConnectionAbortedError
        file = self._write(states)
        with self._lock:
            self.served += 1
        return self._completion(tokens, states, file), file

    def _tokens(self, asked: Any) -> list[int]:
        def refuse(sentence: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> HttpFault:
            return HttpFault(status, sentence)

        if not isinstance(asked, dict):
            raise refuse("the request is no JSON object")
        if asked.get("model") not in (None, self.model):
            raise refuse(f"model {asked['model']!r} is not served here, {self.model!r} is", HTTPStatus.NOT_FOUND)
        if asked.get("stream") or asked.get("max_tokens", 1) != 1 or asked.get("n", 1) != 1:
            raise refuse("hidden states only: send max_tokens 1, n 1 and no stream")
        tokens = asked.get("prompt")
        if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
            raise refuse("`prompt` must be a list of token ids, not empty; text is not tokenised here")
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            raise refuse(f"token ids run from {min(tokens)} to {max(tokens)}; the target has {self.vocab_size} ids")
        return tokens

    def _write(self, states: States) -> Path:
        file = self.folder / f"states-{secrets.token_hex(12)}.safetensors"
        partial = file.with_suffix(".partial")
        tensors = {"hidden_states": states.hidden_states.contiguous(), "token_ids": states.token_ids.contiguous()}
        try:
            save_file(tensors, partial)
            os.replace(partial, file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise HttpFault(HTTPStatus.INSUFFICIENT_STORAGE, f"the states could not be written: {error}") from error
        return file

    def _completion(self, tokens: list[int], states: States, file: Path) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": "",
            "logprobs": None,
            "finish_reason": "length",
            "prompt_token_ids": tokens,
            "token_ids": [states.next_token],
        }
        return {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice],
            "usage": {"prompt_tokens": len(tokens), "completion_tokens": 1, "total_tokens": len(tokens) + 1},
            "kv_transfer_params": {"hidden_states_path": str(file)},
        }

    def _clear(self) -> None:
        for file in [*self.folder.glob("states-*.safetensors"), *self.folder.glob("states-*.partial")]:
            file.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._clear()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of ours; anything else is shown whole."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """HTTP/1.1 with kept connections, as the client of speculators has them."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    front: Front

    def do_GET(self) -> None:
        front = self.front
        if self.path == "/health":
            try:
                front.check()
            except EngineError as error:
                self._fault(HttpFault(HTTPStatus.SERVICE_UNAVAILABLE, str(error)))
                return
            self._json(HTTPStatus.OK, {"status": "ok", "served": front.served})
        elif self.path == "/v1/models":
            model = {"id": front.model, "object": "model", "created": 0, "owned_by": "eagle3"}
            self._json(HTTPStatus.OK, {"object": "list", "data": [model]})
        else:
            self._fault(HttpFault(HTTPStatus.NOT_FOUND, f"there is no {self.path} here"))

    def do_POST(self) -> None:
        try:
            asked = self._body()
            if self.path != "/v1/completions":
                raise HttpFault(
                    HTTPStatus.NOT_FOUND, f"there is no {self.path} here; send token ids to /v1/completions"
                )
            answer, file = self.front.answer(asked, self._gone)
        except HttpFault as fault:
            self._fault(fault)
            return
        try:
            self._json(HTTPStatus.OK, answer)
        except ConnectionError:
            # Nobody will fetch it.
            file.unlink(missing_ok=True)
            raise

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing for each request; ``GET /health`` counts them."""

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self.close_connection = True
            raise HttpFault(HTTPStatus.LENGTH_REQUIRED, "the request needs a Content-Length")
        if int(length) > LONGEST_BODY:
            self.close_connection = True
            raise HttpFault(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {LONGEST_BODY} bytes")
        try:
            return json.loads(self.rfile.read(int(length)))
        except ValueError as error:
            raise HttpFault(HTTPStatus.BAD_REQUEST, f"the request is not JSON: {error}") from error

    def _gone(self) -> bool:
        """Whether the client has closed its end; it sends nothing more before its answer."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def _fault(self, fault: HttpFault) -> None:
        error = {"message": fault.sentence, "type": fault.status.phrase, "code": int(fault.status)}
        self._json(fault.status, {"error": error})

    def _json(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
