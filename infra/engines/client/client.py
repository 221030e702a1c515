"""Talking to an engine's server in token ids, whichever engine it is."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from infra.engines.client.counters import SpecCounters
from infra.engines.client.dialect import Dialect, Generation, RequestRefused, Sampling, StatesFile, ids_of
from infra.engines.client.faults import EngineSilent, Unreachable, status_error, understood
from infra.engines.client.flights import Flights
from infra.engines.client.load import Caller, Sent, Timed, send
from infra.engines.client.wire import TROUBLE, Wire
from infra.errors import EngineError

__all__ = ["Client", "EngineSilent", "Generation", "RequestRefused", "Sampling", "StatesFile", "Timed"]

RETRIES = 3
BACKOFF_SECONDS = 0.5
RETRIED_STATUS = frozenset({408, 429})
Payload = Callable[[], Mapping[str, Any]]
"""Makes the body of a request, anew for each try."""


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
        self._base_url, self._dialect, self._timeout = base_url, dialect, timeout
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
        with understood(dialect.completions):
            self._count(reply)
            answer = dialect.answer(prompt_ids, reply)
        if len(answer.token_ids) > sampling.max_tokens:
            raise EngineError(
                f"the engine answered {len(answer.token_ids)} tokens",
                expected=f"at most {sampling.max_tokens}, as it was asked",
            )
        return answer

    def load(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        concurrency: int,
        seconds: float = 0.0,
        flights: Flights | None = None,
    ) -> Sent:
        """Answers to many prompts, timed piece by piece; see :func:`infra.engines.client.load.send`."""
        if self.closed:
            raise EngineError("the client is closed")
        caller = Caller(self._base_url, self._dialect, self._timeout, self._closed, self._count)
        return send(caller, prompts, sampling, concurrency=concurrency, seconds=seconds, flights=flights)

    def stream(self, prompt_ids: Sequence[int], sampling: Sampling) -> Timed:
        """As :meth:`generate`, timed piece by piece; never retried, since a second try would not be a measurement."""
        return self.load([prompt_ids], sampling, concurrency=1).answers[0]

    def extract(self, token_ids: Sequence[int]) -> StatesFile:
        """Let a server with profile ``extract`` write the hidden states of a token sequence.

        Raises:
            RequestRefused: the engine does not take this sequence.
            ExtractionFault: it has no states of these tokens.
            EngineError: the server cannot be reached or fails.
        """
        dialect = self._dialect
        reply = self._json("POST", dialect.completions, lambda: dialect.extraction(token_ids))
        with understood(dialect.completions):
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
        with understood(self._dialect.counters):
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
            raise EngineError(
                f"{path} answered something that is not JSON: {reply[:200].decode(errors='replace')!r}"
            ) from error
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
            except Unreachable:
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
            raise Unreachable(
                f"{path} cannot be reached: {str(error) or type(error).__name__}", fix="read the engine's log"
            ) from error


def _json(payload: Mapping[str, Any]) -> bytes:
    return json.dumps(payload, separators=(",", ":")).encode()


def _check_status(path: str, status: int, data: bytes) -> None:
    if status != 200:
        raise status_error(path, status, data.decode(errors="replace"))
