"""Load on one server: so many requests in flight all the time, every piece of their answers timed.

The client must not be what is measured. One thread runs an event loop that only sends, takes bytes and stamps them.
They are read when the last answer has ended. aiohttp is what vLLM's own benchmark sends with.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp

from infra.engines.client.dialect import Dialect, Sampling, check_prompt
from infra.engines.client.faults import EngineSilent, Unreachable, status_error, understood
from infra.engines.client.flights import Flights
from infra.engines.client.pool import WAKE_SECONDS
from infra.errors import EngineError

CONNECT_SECONDS = 10.0
TICK_SECONDS = 0.01
"""How often the loop looks how late it is."""
EVENT = b"data: "
LAST = b"[DONE]"


@dataclass(frozen=True)
class Timed:
    """An answer and when its tokens came; moments are seconds of one clock.

    Args:
        prompt_ids: what was asked.
        token_ids: the answer's tokens.
        begin: when the request was sent.
        moments: when each piece of the stream came, and its tokens: the first piece is the prompt's, each other one a
            step of the target, unless the server joined some.
        end: when the stream ended.
        finish_reason: "stop" or "length".
    """

    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    begin: float
    moments: tuple[tuple[float, int], ...]
    end: float
    finish_reason: str

    @property
    def first_token_seconds(self) -> float:
        """From sending the request to the first token."""
        return self.moments[0][0] - self.begin

    @property
    def pieces(self) -> int:
        """How many pieces came after the first one."""
        return len(self.moments) - 1

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(moment, seconds) between any two tokens; the moment is the later token's.

        A piece of n tokens that came after a gap g counts as n gaps of g/n. Tokens that came together with the first
        one have gaps of 0.
        """
        found = [(self.moments[0][0], 0.0)] * (self.moments[0][1] - 1)
        for (before, _), (now, count) in pairwise(self.moments):
            found += [(now, (now - before) / count)] * count
        return found


@dataclass(frozen=True)
class Sent:
    """What came of a load.

    Args:
        answers: in the order in which they were asked.
        begin: the load's first moment.
        end: its last one.
        lags: how late the client's loop was at each of its ticks, seconds; what came then has too late a stamp.
    """

    answers: list[Timed]
    begin: float
    end: float
    lags: list[float]


@dataclass(frozen=True)
class Caller:
    """How one server is reached.

    Args:
        base_url: e.g. ``http://127.0.0.1:8000``.
        dialect: the engine's.
        timeout: longest silence of the server within a request, seconds.
        closed: set by whoever gives up.
        count: told the last event of each answer.
    """

    base_url: str
    dialect: Dialect
    timeout: float
    closed: threading.Event
    count: Callable[[Mapping[str, Any]], None]


def send(
    caller: Caller,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    concurrency: int,
    seconds: float = 0.0,
    flights: Flights | None = None,
) -> Sent:
    """Ask every prompt once, and all again in turn until ``seconds`` have passed since all places were answering.

    Nothing is retried: a second try would not be a measurement.

    Args:
        caller: the server.
        prompts: token ids.
        sampling: how every answer is sampled.
        concurrency: requests in flight.
        seconds: least time with all places taken; 0 asks every prompt once and no more.
        flights: where the requests are told, for whoever watches the server.

    Raises:
        EngineError: a request failed.
    """
    load = _Load(caller, prompts, sampling, concurrency, seconds, flights or Flights())
    done: Future[None] = Future()
    threading.Thread(target=load.run, args=(done,), name="load", daemon=True).start()
    try:
        while not wait([done], WAKE_SECONDS).done:
            if caller.closed.is_set():
                load.cancel()
    finally:  # also when an exception is thrown in from another thread
        load.cancel()
    if caller.closed.is_set() and done.exception() is not None:
        raise EngineError("the client was closed during the request")
    done.result()
    return Sent([load.read(number) for number in range(load.begun)], load.begin, load.end, load.lags)


@dataclass(frozen=True)
class _Raw:
    """An answer as it came: when, and which bytes."""

    begin: float
    arrivals: list[tuple[float, bytes]]
    end: float


class _Load:
    """One load; its loop runs in a thread of its own."""

    def __init__(
        self,
        caller: Caller,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        concurrency: int,
        seconds: float,
        flights: Flights,
    ) -> None:
        self._caller, self._prompts, self._seconds, self._flights = caller, prompts, seconds, flights
        self._path, self._places = caller.dialect.completions, concurrency
        self._bodies = [json.dumps(caller.dialect.completion(ids, sampling, stream=True)).encode() for ids in prompts]
        self._raw: dict[int, _Raw] = {}
        self._answering, self._full_since = 0, 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None
        self._cancelled = threading.Event()
        self.begun, self.begin, self.end = 0, 0.0, 0.0
        self.lags: list[float] = []

    def run(self, done: "Future[None]") -> None:
        """Work until the load is over, and say so."""
        try:
            self.begin = time.perf_counter()
            asyncio.run(self._main())
            self.end = time.perf_counter()
            done.set_result(None)
        except BaseException as error:  # handed to the caller, who raises it
            done.set_exception(error if isinstance(error, Exception) else EngineError("the requests were given up"))

    def cancel(self) -> None:
        """Give up what is in flight; without effect when all is over."""
        self._cancelled.set()
        loop, work = self._loop, self._work
        if loop is not None and work is not None and not loop.is_closed():
            loop.call_soon_threadsafe(work.cancel)

    def read(self, number: int) -> Timed:
        """The answer with this number.

        Raises:
            EngineError: it is none, or one to something else.
        """
        raw, prompt = self._raw[number], self._prompts[number % len(self._prompts)]
        token_ids: list[int] = []
        moments: list[tuple[float, int]] = []
        finish, seen_prompt, event = "", None, dict[str, Any]()
        with understood(self._path):
            for moment, line in _lines(raw.arrivals):
                if not line.startswith(EVENT) or line == EVENT + LAST:
                    continue
                event = json.loads(line[len(EVENT) :])
                piece = self._caller.dialect.piece(event, len(token_ids))
                if piece.token_ids:
                    moments.append((moment, len(piece.token_ids)))
                token_ids += piece.token_ids
                seen_prompt = piece.prompt_ids or seen_prompt
                finish = piece.finish_reason or finish
        check_prompt(prompt, seen_prompt)
        if not finish or not moments:
            raise EngineError(f"the engine's stream ended after {len(token_ids)} tokens without a finish reason")
        with understood(self._path):
            self._caller.count(event)
        return Timed(tuple(prompt), token_ids, raw.begin, tuple(moments), raw.end, finish)

    async def _main(self) -> None:
        self._loop, self._work = asyncio.get_running_loop(), asyncio.create_task(self._all())
        if self._cancelled.is_set():
            self._work.cancel()
        await self._work

    async def _all(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=self._caller.timeout)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
            places = [asyncio.create_task(self._place(session)) for _ in range(self._places)]
            ticks = asyncio.create_task(self._tick())
            try:
                await asyncio.gather(*places)
            finally:
                for task in (ticks, *places):
                    task.cancel()

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.lags.append(time.perf_counter() - due)

    async def _place(self, session: aiohttp.ClientSession) -> None:
        while not self._over():
            number, self.begun = self.begun, self.begun + 1
            with self._flights.of(f"request {number}"):
                self._raw[number] = await self._ask(session, self._bodies[number % len(self._bodies)])

    def _over(self) -> bool:
        if self.begun < len(self._prompts):
            return False
        full = time.perf_counter() - self._full_since if self._answering >= self._places else 0.0
        return full >= self._seconds

    async def _ask(self, session: aiohttp.ClientSession, body: bytes) -> _Raw:
        begin, arrivals = time.perf_counter(), list[tuple[float, bytes]]()
        try:
            async with session.post(
                self._caller.base_url + self._path, data=body, headers={"content-type": "application/json"}
            ) as reply:
                if reply.status != 200:
                    raise status_error(self._path, reply.status, await reply.text(errors="replace"))
                async for data in reply.content.iter_any():
                    arrivals.append((time.perf_counter(), data))
                    if len(arrivals) == 1:
                        self._answering += 1
                        if self._answering == self._places:
                            self._full_since = arrivals[0][0]
        except aiohttp.SocketTimeoutError as error:
            raise EngineSilent(f"{self._path} was silent for longer than its time limit") from error
        except aiohttp.ClientError as error:
            raise Unreachable(
                f"{self._path} cannot be reached: {str(error) or type(error).__name__}", fix="read the engine's log"
            ) from error
        return _Raw(begin, arrivals, time.perf_counter())


def _lines(arrivals: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Whole lines, and when the last byte of each came."""
    found, rest = list[tuple[float, bytes]](), b""
    for moment, data in arrivals:
        *whole, rest = (rest + data).split(b"\n")
        found += [(moment, line.rstrip(b"\r")) for line in whole]
    return [*found, (arrivals[-1][0], rest)] if rest else found
