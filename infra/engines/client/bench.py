"""Measuring a server: speed, latency and acceptance."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import TypeVar

from infra.engines.client.client import Client, Sampling, Timed
from infra.engines.client.counters import SpecCounters
from infra.engines.client.flights import Flights
from infra.engines.client.pool import run_pool

T = TypeVar("T")
R = TypeVar("R")

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
    answers: list[list[int]]


@dataclass(frozen=True)
class Run:
    """One pass over some prompts, raw; runs over other prompts of the same kind are summed up together.

    Args:
        timed: the answers, in the order of the prompts.
        seconds: wall time from the first request to the last token.
        counters: growth of the engine's counters over the run; None without a draft.
    """

    timed: list[Timed]
    seconds: float
    counters: SpecCounters | None


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
        concurrency: requests in flight.
        flights: where the requests are told, for whoever watches the server.

    Raises:
        EngineError: a request failed; a measurement with holes is none.
    """
    send = (flights or Flights()).around(partial(client.stream, sampling=sampling))
    before = settled_counters(client)
    started = time.perf_counter()
    numbered = list(enumerate(prompts))
    timed = dict(_drain(run_pool(numbered, lambda item: (item[0], send(item[1])), concurrency)))
    seconds = time.perf_counter() - started
    after = settled_counters(client)
    return Run([timed[number] for number in range(len(prompts))], seconds, _growth(before, after))


def summary(runs: Sequence[Run]) -> Measurement:
    """The figures of several runs as if they were one: sums, and percentiles over all requests."""
    timed = [item for single in runs for item in single.timed]
    counters = [single.counters for single in runs if single.counters is not None]
    return _summary(timed, sum(single.seconds for single in runs), reduce(add, counters) if counters else None)


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


def _summary(timed: Sequence[Timed], seconds: float, counters: SpecCounters | None) -> Measurement:
    tokens = sum(len(item.token_ids) for item in timed)
    first = [item.first_token_seconds for item in timed]
    gaps = [gap for item in timed for gap in item.gaps_seconds]
    return Measurement(
        output_tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        ttft_p50=percentile(first, 0.5),
        ttft_p95=percentile(first, 0.95),
        itl_p50=percentile(gaps, 0.5),
        itl_p95=percentile(gaps, 0.95),
        counters=counters,
        answers=[item.token_ids for item in timed],
    )


def _drain(results: Iterator[tuple[T, R | Exception]]) -> list[R]:
    """All results; the first exception is raised, and what is left is not started."""
    outcomes: list[R] = []
    for _, outcome in results:
        if isinstance(outcome, Exception):
            raise outcome
        outcomes.append(outcome)
    return outcomes
