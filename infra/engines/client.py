"""Talking to an engine's OpenAI server in token ids."""

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import httpx

from infra.engines.counters import SpecCounters, parse_spec_counters
from infra.errors import EngineError

RETRIES = 3
BACKOFF_SECONDS = 0.5
RETRIED_STATUS = frozenset({408, 429})


class RequestRefused(EngineError):
    """The engine refuses this one request (4xx); the server itself is well."""


@dataclass(frozen=True)
class Generation:
    """An answer.

    Args:
        token_ids: the answer's tokens; ends with the end-of-turn token when ``finish_reason`` is "stop".
        finish_reason: "stop", or "length" when it was cut at ``max_tokens``.
        prompt_ids: the prompt as the engine had it, equal to what was sent.
    """

    token_ids: list[int]
    finish_reason: str
    prompt_ids: list[int]


@dataclass(frozen=True)
class Timed:
    """An answer and when its tokens came.

    Args:
        token_ids: the answer's tokens.
        first_token_seconds: from sending the request to the first token.
        gaps_seconds: one entry between any two tokens. A piece of n tokens that came after a gap g counts as n gaps of
            g/n; tokens that came together with the first one have gaps of 0.
        total_seconds: from sending the request to the last token.
        finish_reason: "stop" or "length".
        pieces: how many pieces came after the first one: one a step of the target, unless the server joined some.
    """

    token_ids: list[int]
    first_token_seconds: float
    gaps_seconds: list[float]
    total_seconds: float
    finish_reason: str
    pieces: int


class Client:
    """Requests to one server; may be shared between threads.

    Connection errors and 5xx answers are retried a few times with growing pauses, since answers are functions of the
    request; after that they are EngineErrors.

    Args:
        base_url: e.g. ``http://127.0.0.1:8000``.
        timeout: longest silence of the server within a request, seconds.
    """

    def __init__(self, base_url: str, timeout: float = 600.0) -> None:
        self._closed = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.Client(
            base_url=base_url, timeout=httpx.Timeout(timeout, connect=10.0), limits=limits, trust_env=False
        )

    def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
    ) -> Generation:
        """The target's answer to a prompt.

        Raises:
            RequestRefused: the engine does not take this prompt.
            EngineError: the server cannot be reached, fails, or answered something that is not an answer.
        """
        answer = self.complete(_completion(prompt_ids, max_tokens, temperature, top_p, seed))
        choice = answer["choices"][0]
        _check_prompt(prompt_ids, choice.get("prompt_token_ids"))
        return Generation(_ids(choice), str(choice["finish_reason"]), list(prompt_ids))

    def complete(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /v1/completions`` as it is, for what :meth:`generate` does not cover; raises the same errors."""
        answer = self._json("POST", "/v1/completions", payload)
        if not answer.get("choices"):
            raise EngineError(f"the engine answered without choices: {str(answer)[:200]}")
        return answer

    def stream(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
    ) -> Timed:
        """As :meth:`generate`, timed token by token; never retried, since a second try would not be a measurement."""
        payload = _completion(prompt_ids, max_tokens, temperature, top_p, seed) | {"stream": True}
        started = time.perf_counter()
        token_ids: list[int] = []
        moments: list[tuple[float, int]] = []
        finish, seen_prompt = "", None
        with (
            self._errors("/v1/completions"),
            self._http.stream("POST", "/v1/completions", json=payload, extensions=self._trace) as reply,
        ):
            if reply.status_code != 200:
                reply.read()
            _check_status(reply)
            for event in _events(reply.iter_lines()):
                choice = _choice(event)
                fresh = _ids(choice)
                if fresh:
                    moments.append((time.perf_counter() - started, len(fresh)))
                token_ids += fresh
                seen_prompt = choice.get("prompt_token_ids") or seen_prompt
                finish = choice.get("finish_reason") or finish
        _check_prompt(prompt_ids, seen_prompt)
        if not finish or not moments:
            raise EngineError(f"the engine's stream ended after {len(token_ids)} tokens without a finish reason")
        return Timed(token_ids, moments[0][0], _gaps(moments), moments[-1][0], finish, len(moments) - 1)

    def tokenize_chat(
        self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation under the engine's own chat template, the assistant's opening included."""
        payload = {
            "messages": list(messages),
            "add_generation_prompt": True,
            "add_special_tokens": False,
            "chat_template_kwargs": dict(template_args or {}),
        }
        answer = self._json("POST", "/tokenize", payload)
        tokens = answer.get("tokens")
        if not isinstance(tokens, list):
            raise EngineError(f"/tokenize answered without tokens: {str(answer)[:200]}")
        return [int(token) for token in tokens]

    def spec_counters(self) -> SpecCounters | None:
        """Counters of speculative decoding, summed over the server's engines; None when it serves without a draft."""
        return parse_spec_counters(self._request("GET", "/metrics").text)

    def close(self) -> None:
        """Give up: requests in flight fail at once, in whatever thread they wait."""
        self._closed.set()
        with self._lock:
            for open_socket in self._sockets:
                with suppress(OSError):  # it was closed already
                    open_socket.shutdown(socket.SHUT_RDWR)
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _json(self, method: str, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        reply = self._request(method, path, payload)
        try:
            answer = reply.json()
        except ValueError as error:
            raise EngineError(f"{path} answered something that is not JSON: {reply.text[:200]!r}") from error
        if not isinstance(answer, dict):
            raise EngineError(f"{path} answered a {type(answer).__name__}", expected="a JSON object")
        return answer

    def _request(self, method: str, path: str, payload: Mapping[str, Any] | None = None) -> httpx.Response:
        for attempt in range(RETRIES + 1):
            last = attempt == RETRIES
            try:
                with self._errors(path):
                    reply = self._http.request(method, path, json=payload, extensions=self._trace)
                    if last or not (reply.status_code >= 500 or reply.status_code in RETRIED_STATUS):
                        _check_status(reply)
                        return reply
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
        except httpx.TimeoutException as error:
            raise EngineError(f"{path} was silent for longer than its time limit") from error
        except httpx.HTTPError as error:
            if self._closed.is_set():
                raise EngineError("the client was closed during the request") from error
            raise _Unreachable(
                f"{path} cannot be reached: {error or type(error).__name__}", fix="read the engine's log"
            ) from error

    @property
    def _trace(self) -> dict[str, Any]:
        return {"trace": self._note_socket}

    def _note_socket(self, event: str, info: Mapping[str, Any]) -> None:
        """httpx's trace hook: remembers each connection's socket, so that :meth:`close` can wake who waits on it."""
        if event != "connection.connect_tcp.complete":
            return
        opened = info["return_value"].get_extra_info("socket")
        with self._lock:
            self._sockets = {kept for kept in self._sockets if kept.fileno() >= 0} | {opened}
        if self._closed.is_set():
            opened.shutdown(socket.SHUT_RDWR)


class _Unreachable(EngineError):
    """A failure of the connection, worth another try."""


def _completion(
    prompt_ids: Sequence[int], max_tokens: int, temperature: float, top_p: float, seed: int
) -> dict[str, Any]:
    """A request that names every sampling value, so that no default of the model's generation_config gets in."""
    return {
        "prompt": list(prompt_ids),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed,
        "return_token_ids": True,
    }


def _check_status(reply: httpx.Response) -> None:
    if reply.status_code == 200:
        return
    message = f"{reply.request.url.path} answered {reply.status_code}: {_message(reply)}"
    raise RequestRefused(message) if 400 <= reply.status_code < 500 else EngineError(message)


def _message(reply: httpx.Response) -> str:
    try:
        body = reply.json()
        return str(body["error"]["message"] if "error" in body else body.get("message", body))[:400]
    except (ValueError, KeyError, TypeError):
        return reply.text[:400]


def _check_prompt(sent: Sequence[int], seen: Sequence[int] | None) -> None:
    if seen is None or list(seen) != list(sent):
        got = "no prompt" if seen is None else f"a prompt of {len(seen)} tokens"
        raise EngineError(
            f"the engine answered {got} that is not the one of {len(sent)} tokens it was sent",
            expected="the same token ids back (`return_token_ids`)",
        )


def _ids(choice: Mapping[str, Any]) -> list[int]:
    ids = choice.get("token_ids")
    if not isinstance(ids, list):
        raise EngineError("the engine answered without token ids", expected="an engine that knows `return_token_ids`")
    return ids


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _choice(event: Mapping[str, Any]) -> dict[str, Any]:
    if not event.get("choices"):
        raise EngineError(f"the engine's stream broke off: {str(event.get('error', event))[:300]}")
    choice: dict[str, Any] = event["choices"][0]
    return choice


def _gaps(moments: Sequence[tuple[float, int]]) -> list[float]:
    gaps = [0.0] * (moments[0][1] - 1)
    for (before, _), (now, count) in pairwise(moments):
        gaps += [(now - before) / count] * count
    return gaps
