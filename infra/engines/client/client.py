"""Talking to an engine's server in token ids, whichever engine it is."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from infra.engines.client.counters import SpecCounters
from infra.engines.client.dialect import Dialect, Generation, RequestRefused, Sampling, StatesFile, check_prompt, ids_of
from infra.engines.client.wire import TROUBLE, Wire
from infra.errors import EngineError

__all__ = ["Client", "EngineSilent", "Generation", "RequestRefused", "Sampling", "StatesFile", "Timed"]

RETRIES = 3
BACKOFF_SECONDS = 0.5
RETRIED_STATUS = frozenset({408, 429})
Payload = Callable[[], Mapping[str, Any]]
"""Makes the body of a request, anew for each try."""


class EngineSilent(EngineError):
    """The server has not answered a request within its time limit."""


@dataclass(frozen=True)
class Timed:
    """An answer and when its tokens came.

    Args:
        token_ids: the answer's tokens.
        first_token_seconds: from sending the request to the first token.
        gaps_seconds: one entry between any two tokens. A piece of n tokens that came after a gap g counts as n gaps of
            g/n; tokens that came together with the first one have gaps of 0.
        finish_reason: "stop" or "length".
        pieces: how many pieces came after the first one: one a step of the target, unless the server joined some.
    """

    token_ids: list[int]
    first_token_seconds: float
    gaps_seconds: list[float]
    finish_reason: str
    pieces: int


class Client:
    """Requests to one server; may be shared between threads.

    Connection errors and 5xx answers are retried a few times with growing pauses, since answers are functions of the
    request; after that they are EngineErrors.

    Args:
        base_url: e.g. ``http://127.0.0.1:8000``.
        dialect: the engine's.
        timeout: longest silence of the server within a request, seconds.
    """

    def __init__(self, base_url: str, dialect: Dialect, timeout: float = 600.0) -> None:
        self._dialect = dialect
        self._counted: SpecCounters | None = None
        self._lock = threading.Lock()
        self._wire = Wire(base_url, timeout)
        self._closed = self._wire.closed

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """The target's answer to a prompt.

        Raises:
            RequestRefused: the engine does not take this prompt.
            EngineError: the server cannot be reached, fails, or answered something that is not an answer.
        """
        dialect = self._dialect
        reply = self._json("POST", dialect.completions, lambda: dialect.completion(prompt_ids, sampling))
        with _understood(dialect.completions):
            self._count(reply)
            answer = dialect.answer(prompt_ids, reply)
        if len(answer.token_ids) > sampling.max_tokens:
            raise EngineError(
                f"the engine answered {len(answer.token_ids)} tokens",
                expected=f"at most {sampling.max_tokens}, as it was asked",
            )
        return answer

    def stream(self, prompt_ids: Sequence[int], sampling: Sampling) -> Timed:
        """As :meth:`generate`, timed token by token; never retried, since a second try would not be a measurement."""
        path = self._dialect.completions
        payload = self._dialect.completion(prompt_ids, sampling, stream=True)
        started = time.perf_counter()
        token_ids: list[int] = []
        moments: list[tuple[float, int]] = []
        finish, seen_prompt, event = "", None, dict[str, Any]()
        with (
            self._errors(path),
            _understood(path),
            self._wire.exchange("POST", path, _json(payload)) as reply,
        ):
            if reply.status != 200:
                _check_status(path, reply.status, reply.read())
            for event in _events(reply):
                piece = self._dialect.piece(event, len(token_ids))
                if piece.token_ids:
                    moments.append((time.perf_counter() - started, len(piece.token_ids)))
                token_ids += piece.token_ids
                seen_prompt = piece.prompt_ids or seen_prompt
                finish = piece.finish_reason or finish
        check_prompt(prompt_ids, seen_prompt)
        if not finish or not moments:
            raise EngineError(f"the engine's stream ended after {len(token_ids)} tokens without a finish reason")
        with _understood(path):
            self._count(event)
        return Timed(token_ids, moments[0][0], _gaps(moments), finish, len(moments) - 1)

    def extract(self, token_ids: Sequence[int]) -> StatesFile:
        """Let a server with profile ``extract`` write the hidden states of a token sequence.

        Raises:
            RequestRefused: the engine does not take this sequence.
            ExtractionFault: it has no states of these tokens.
            EngineError: the server cannot be reached or fails.
        """
        dialect = self._dialect
        reply = self._json("POST", dialect.completions, lambda: dialect.extraction(token_ids))
        with _understood(dialect.completions):
            return dialect.extracted(token_ids, reply)

    def tokenize_chat(
        self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation under the engine's own chat template, the assistant's opening included."""
        path = self._dialect.tokenize
        answer = self._json("POST", path, lambda: self._dialect.chat(messages, template_args or {}))
        return ids_of(answer, "tokens")

    def spec_counters(self) -> SpecCounters | None:
        """Counters of speculative decoding, summed over the server's engines; None when it serves without a draft.

        Where each answer has its own share, they are the sum over this client's answers, and None before the first.
        """
        if self._dialect.counters is None:
            return self._counted
        page = self._request("GET", self._dialect.counters).decode()
        with _understood(self._dialect.counters):
            return self._dialect.counted(page)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed.is_set()

    def close(self) -> None:
        """Give up: requests in flight fail at once, in whatever thread they wait."""
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self, reply: Mapping[str, Any]) -> None:
        share = self._dialect.share(reply)
        if share is not None:
            with self._lock:
                self._counted = share if self._counted is None else self._counted + share

    def _json(self, method: str, path: str, payload: Payload) -> dict[str, Any]:
        reply = self._request(method, path, payload)
        try:
            answer = json.loads(reply)
        except ValueError as error:
            raise EngineError(f"{path} answered something that is not JSON: {_text(reply)[:200]!r}") from error
        if not isinstance(answer, dict):
            raise EngineError(f"{path} answered a {type(answer).__name__}", expected="a JSON object")
        return answer

    def _request(self, method: str, path: str, payload: Payload | None = None) -> bytes:
        for attempt in range(RETRIES + 1):
            last = attempt == RETRIES
            try:
                with self._errors(path):
                    body = _json(payload()) if payload is not None else None
                    with self._wire.exchange(method, path, body) as reply:
                        status, data = reply.status, reply.read()
                    if last or not (status >= 500 or status in RETRIED_STATUS):
                        _check_status(path, status, data)
                        return data
            except _Unreachable:
                if last or self._closed.is_set():
                    raise
            self._closed.wait(BACKOFF_SECONDS * 2**attempt)
        raise AssertionError("unreachable")

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        if self._closed.is_set():
            raise EngineError("the client is closed")
        try:
            yield
        except TimeoutError as error:
            raise EngineSilent(f"{path} was silent for longer than its time limit") from error
        except TROUBLE as error:
            if self._closed.is_set():
                raise EngineError("the client was closed during the request") from error
            raise _Unreachable(
                f"{path} cannot be reached: {str(error) or type(error).__name__}", fix="read the engine's log"
            ) from error


class _Unreachable(EngineError):
    """A failure of the connection, worth another try."""


def _json(payload: Mapping[str, Any]) -> bytes:
    return json.dumps(payload, separators=(",", ":")).encode()


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _check_status(path: str, status: int, data: bytes) -> None:
    if status == 200:
        return
    message = f"{path} answered {status}: {_message(data)}"
    raise RequestRefused(message) if 400 <= status < 500 else EngineError(message)


def _message(data: bytes) -> str:
    try:
        body = json.loads(data)
        return str(body["error"]["message"] if "error" in body else body.get("message", body))[:400]
    except (ValueError, LookupError, TypeError, AttributeError):
        return _text(data)[:400]


@contextmanager
def _understood(path: str) -> Iterator[None]:
    """Around reading an answer: one of another shape than the engine's is the server's fault, not this program's."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineError(
            f"{path} answered in a shape that is not the engine's: {type(error).__name__}: {error}",
            fix="see that nothing else answers on the engine's port, and that its version is one that is known",
        ) from error


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith(b"data: ") and (data := line[6:].strip()) != b"[DONE]":
            yield json.loads(data)


def _gaps(moments: Sequence[tuple[float, int]]) -> list[float]:
    gaps = [0.0] * (moments[0][1] - 1)
    for (before, _), (now, count) in pairwise(moments):
        gaps += [(now - before) / count] * count
    return gaps
