"""Measuring a server: speed, latency and acceptance."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate
from operator import add
from typing import TypeVar

from infra.engines.client.client import Client, Sampling, Timed
from infra.engines.client.counters import SpecCounters
from infra.engines.client.flights import Flights
from infra.engines.client.pool import run_pool

T = TypeVar("T")
R = TypeVar("R")
Span = tuple[float, float]
"""A request's begin and end, seconds of one clock."""

WARMUP_TOKENS = 16
SETTLE_SECONDS = 0.1


@dataclass(frozen=True)
class Measurement:
    """What one run over the prompts measured; warm-up requests are in none of the figures.

    Args:
        output_tokens: tokens of all answers.
        seconds: wall time from the first request to the last token.
        tokens_per_second: the quotient of the two.
        ttft_p50: median time from sending a request to its first token, seconds (p95 alike).
        itl_p50: median time between two tokens, seconds (p95 alike); see :class:`Timed` for pieces of
            several tokens.
        counters: growth of the engine's counters over the run; None without a draft.
        most_in_flight: most requests that waited for their answers at one moment.
        mean_in_flight: how many did on average over the time.
        answers: token ids of the answers, in the order of the prompts.
    """

    output_tokens: int
    seconds: float
    tokens_per_second: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    itl_p95: float
    counters: SpecCounters | None
    most_in_flight: int
    mean_in_flight: float
    answers: list[list[int]]


@dataclass(frozen=True)
class Run:
    """One pass over some prompts, raw; runs over other prompts of the same kind are summed up together.

    Args:
        timed: the answers, in the order of the prompts.
        seconds: wall time from the first request to the last token.
        counters: growth of the engine's counters over the run; None without a draft.
        most_in_flight: most requests that waited for their answers at one moment; fewer than asked for where there
            are too few prompts.
        busy_seconds: time from sending a request to its end, summed over the requests.
    """

    timed: list[Timed]
    seconds: float
    counters: SpecCounters | None
    most_in_flight: int
    busy_seconds: float


def warm_up(
    client: Client, prompts: Sequence[Sequence[int]], *, concurrency: int, flights: Flights | None = None
) -> None:
    """Send a few prompts that are in no figure."""
    send = (flights or Flights()).around(partial(client.stream, sampling=Sampling(WARMUP_TOKENS)))
    _drain(run_pool(prompts, send, concurrency))


def run(
    client: Client,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    concurrency: int,
    flights: Flights | None = None,
) -> Run:
    """Send all prompts, ``concurrency`` at a time, and time the answers token by token.

    Args:
        client: a client of a server with profile ``bench``, warmed up.
        prompts: token ids.
        sampling: how every answer is sampled.
        concurrency: most requests in flight; how many were is measured.
        flights: where the requests are told, for whoever watches the server.

    Raises:
        EngineError: a request failed; a measurement with holes is none.
    """
    send = (flights or Flights()).around(partial(client.stream, sampling=sampling))

    def answer(item: tuple[int, Sequence[int]]) -> tuple[int, Timed, Span]:
        begin = time.perf_counter()
        timed = send(item[1])
        return item[0], timed, (begin, time.perf_counter())

    before = settled_counters(client)
    started = time.perf_counter()
    answers = sorted(_drain(run_pool(list(enumerate(prompts)), answer, concurrency)), key=lambda item: item[0])
    seconds = time.perf_counter() - started
    after = settled_counters(client)
    spans = [span for _, _, span in answers]
    return Run(
        timed=[timed for _, timed, _ in answers],
        seconds=seconds,
        counters=_growth(before, after),
        most_in_flight=most_at_once(spans),
        busy_seconds=sum(end - begin for begin, end in spans),
    )


def most_at_once(spans: Sequence[Span]) -> int:
    """How many of the (begin, end) spans, seconds, cover one moment, at most; one that ends as another begins does not.

    Spans without length count as none.
    """
    events = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    return max(accumulate((change for _, change in events)), default=0)


def summary(runs: Sequence[Run]) -> Measurement:
    """The figures of several runs as if they were one: sums, and percentiles over all requests.

    Of the most requests in flight it is the least of the runs: every run had at least so many at some moment.
    """
    timed = [item for single in runs for item in single.timed]
    counters = [single.counters for single in runs if single.counters is not None]
    tokens = sum(len(item.token_ids) for item in timed)
    first = [item.first_token_seconds for item in timed]
    gaps = [gap for item in timed for gap in item.gaps_seconds]
    seconds = sum(single.seconds for single in runs)
    return Measurement(
        output_tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        ttft_p50=percentile(first, 0.5),
        ttft_p95=percentile(first, 0.95),
        itl_p50=percentile(gaps, 0.5),
        itl_p95=percentile(gaps, 0.95),
        counters=reduce(add, counters) if counters else None,
        most_in_flight=min(single.most_in_flight for single in runs),
        mean_in_flight=sum(single.busy_seconds for single in runs) / seconds,
        answers=[item.token_ids for item in timed],
    )


def settled_counters(client: Client) -> SpecCounters | None:
    """The engine's counters once they stand still: it books a step only after it has sent the step's tokens."""
    counters = client.spec_counters()
    while counters is not None:
        time.sleep(SETTLE_SECONDS)
        again = client.spec_counters()
        if again == counters:
            break
        counters = again
    return counters


def looping(answer_ids: Sequence[int], longest_period: int = 64, repeats: int = 4, least_tokens: int = 24) -> bool:
    """Whether an answer ends in a loop: its tail repeats a stretch of at most ``longest_period`` tokens.

    The tail must hold at least ``repeats`` repetitions and at least ``least_tokens`` tokens.
    """
    for period in range(1, min(longest_period, len(answer_ids) // repeats) + 1):
        tail = max(repeats * period, least_tokens)
        if tail <= len(answer_ids) and all(
            answer_ids[-i] == answer_ids[-i - period] for i in range(1, tail - period + 1)
        ):
            return True
    return False


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of the values lie, by the nearest rank; 0.0 when there are none."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -(-int(share * 1000) * len(ranked) // 1000) - 1))]


def _growth(before: SpecCounters | None, after: SpecCounters | None) -> SpecCounters | None:
    """What was counted in between; an engine whose counts come with its answers has none before the first one."""
    return after if after is None or before is None else after - before


def _drain(results: Iterator[tuple[T, R | Exception]]) -> list[R]:
    """All results; the first exception is raised, and what is left is not started."""
    outcomes: list[R] = []
    for _, outcome in results:
        if isinstance(outcome, Exception):
            raise outcome
        outcomes.append(outcome)
    return outcomes
