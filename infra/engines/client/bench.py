"""Measuring a server: speed, latency and acceptance, while as many requests are in flight as were asked for."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from math import exp, log, sqrt
from operator import add
from statistics import fmean, stdev

from infra.engines.client.client import Client, Sampling, Timed
from infra.engines.client.counters import SpecCounters
from infra.engines.client.flights import Flights

Span = tuple[float, float]
"""A begin and an end, seconds of one clock."""

WARMUP_TOKENS = 16
SETTLE_SECONDS = 0.1
STUDENT = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, 97.5 %, for 2 to 10 degrees of freedom."""


@dataclass(frozen=True)
class Measurement:
    """What some runs measured; warm-up requests are in none of the figures.

    Speed, latency and mean in flight are those of the steady state: from the moment when as many answers had begun as
    are in flight, to the first end that no new request followed.

    Args:
        output_tokens: tokens of all answers.
        seconds: wall time of the runs, first request to last token.
        steady_seconds: of these, seconds of steady state; 0 where a run had none, and all of it is counted.
        rates: tokens a second of each run.
        tokens_per_second: tokens of all steady states over their seconds.
        ttft_p50: median time from sending a request to its first token, seconds (p95 alike).
        itl_p50: median time between two tokens, seconds (p95 and p99 alike); see :class:`Timed` for pieces of several
            tokens.
        counters: growth of the engine's counters over the runs; None without a draft.
        most_in_flight: most requests that waited for their answers at one moment; every run had at least so many.
        mean_in_flight: how many did on average.
        client_lag: how late the client was to stamp what came, seconds, 95th percentile, the worst run's.
        answers: token ids of the answers.
    """

    output_tokens: int
    seconds: float
    steady_seconds: float
    rates: tuple[float, ...]
    tokens_per_second: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    itl_p95: float
    itl_p99: float
    counters: SpecCounters | None
    most_in_flight: int
    mean_in_flight: float
    client_lag: float
    answers: list[list[int]]


@dataclass(frozen=True)
class Run:
    """One load on a server, raw.

    Args:
        timed: the answers, in the order in which they were asked.
        span: the run's begin and end.
        concurrency: requests in flight that were asked for.
        counters: growth of the engine's counters over the run; None without a draft.
        lags: how late the client was, time and again, seconds.
    """

    timed: list[Timed]
    span: Span
    concurrency: int
    counters: SpecCounters | None
    lags: list[float]

    @property
    def seconds(self) -> float:
        """Wall time from the first request to the last token."""
        return self.span[1] - self.span[0]

    @property
    def steady(self) -> Span | None:
        """When all places were answering, without ramp-up and drain; None if no token came then."""
        places = min(self.concurrency, len(self.timed))
        begin = sorted(answer.moments[0][0] for answer in self.timed)[places - 1]
        end = sorted(answer.end for answer in self.timed)[len(self.timed) - places]
        return (begin, end) if self._tokens(begin, end) else None

    @property
    def measured(self) -> Span:
        """What is measured: the steady state, or all of it where there is none."""
        return self.steady or self.span

    @property
    def in_flight(self) -> list[tuple[float, int]]:
        """Requests in flight over time: the count from each moment on."""
        return _in_flight([(answer.begin, answer.end) for answer in self.timed])

    @property
    def tokens(self) -> int:
        """Tokens that came in the measured span."""
        return self._tokens(*self.measured)

    @property
    def rate(self) -> float:
        """Tokens a second of the measured span."""
        return self.tokens / _length(self.measured)

    def _tokens(self, begin: float, end: float) -> int:
        return sum(count for answer in self.timed for moment, count in answer.moments if begin < moment <= end)


def warm_up(
    client: Client, prompts: Sequence[Sequence[int]], *, concurrency: int, flights: Flights | None = None
) -> None:
    """Send a few prompts that are in no figure."""
    client.load(prompts, Sampling(WARMUP_TOKENS), concurrency=concurrency, flights=flights)


def run(
    client: Client,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    concurrency: int,
    seconds: float = 0.0,
    flights: Flights | None = None,
) -> Run:
    """Send every prompt once, and all again in turn until the steady state has lasted long enough.

    Args:
        client: a client of a server with profile ``bench``, warmed up.
        prompts: token ids.
        sampling: how every answer is sampled.
        concurrency: requests in flight; how many were is measured.
        seconds: least length of the steady state; 0 sends every prompt once.
        flights: where the requests are told, for whoever watches the server.

    Raises:
        EngineError: a request failed; a measurement with holes is none.
    """
    before = settled_counters(client)
    sent = client.load(prompts, sampling, concurrency=concurrency, seconds=seconds, flights=flights)
    after = settled_counters(client)
    return Run(sent.answers, (sent.begin, sent.end), concurrency, _growth(before, after), sent.lags)


def summary(runs: Sequence[Run]) -> Measurement:
    """The figures of several runs as if they were one: sums, and percentiles over all of their steady states."""
    timed = [answer for single in runs for answer in single.timed]
    counters = [single.counters for single in runs if single.counters is not None]
    first = [value for single in runs for value in _first_tokens(single)]
    gaps = [value for single in runs for value in _gaps(single)]
    steady = [single.steady for single in runs]
    return Measurement(
        output_tokens=sum(len(answer.token_ids) for answer in timed),
        seconds=sum(single.seconds for single in runs),
        steady_seconds=sum(_length(span) for span in steady if span) if all(steady) else 0.0,
        rates=tuple(single.rate for single in runs),
        tokens_per_second=sum(single.tokens for single in runs) / sum(_length(single.measured) for single in runs),
        ttft_p50=percentile(first, 0.5),
        ttft_p95=percentile(first, 0.95),
        itl_p50=percentile(gaps, 0.5),
        itl_p95=percentile(gaps, 0.95),
        itl_p99=percentile(gaps, 0.99),
        counters=reduce(add, counters) if counters else None,
        most_in_flight=min(max((count for _, count in single.in_flight), default=0) for single in runs),
        mean_in_flight=fmean(_mean_in_flight(single) for single in runs),
        client_lag=max(percentile(single.lags, 0.95) for single in runs),
        answers=[answer.token_ids for answer in timed],
    )


def interval(values: Sequence[float]) -> Span | None:
    """95 % interval of the mean of repeated measurements, by Student's t; None for fewer than three."""
    if len(values) < 3:
        return None
    reach = STUDENT[min(len(values) - 2, len(STUDENT)) - 1] * stdev(values) / sqrt(len(values))
    return fmean(values) - reach, fmean(values) + reach


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Span | None:
    """95 % interval of the ratio of paired measurements, by their logarithms; None for fewer than three."""
    found = interval([log(one / other) for one, other in zip(above, below, strict=True)])
    return None if found is None else (exp(found[0]), exp(found[1]))


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


def _first_tokens(single: Run) -> Iterator[float]:
    """Times to the first token of what was asked in the measured span; of all, if nothing was."""
    begin, end = single.measured
    inside = [answer for answer in single.timed if begin <= answer.begin <= end]
    return (answer.first_token_seconds for answer in inside or single.timed)


def _gaps(single: Run) -> Iterator[float]:
    begin, end = single.measured
    return (gap for answer in single.timed for moment, gap in answer.gaps if begin < moment <= end)


def _in_flight(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """How many of the spans cover each moment; one that ends as another begins does not cover it with it."""
    events = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    counts = accumulate(change for _, change in events)
    return [(moment, count) for (moment, _), count in zip(events, counts, strict=True)]


def _mean_in_flight(single: Run) -> float:
    begin, end = single.measured
    steps = [(min(max(moment, begin), end), count) for moment, count in single.in_flight] + [(end, 0)]
    return sum(count * (after - moment) for (moment, count), (after, _) in pairwise(steps)) / (end - begin)


def _length(span: Span) -> float:
    return span[1] - span[0]


def _growth(before: SpecCounters | None, after: SpecCounters | None) -> SpecCounters | None:
    """What was counted in between; an engine whose counts come with its answers has none before the first one."""
    return after if after is None or before is None else after - before
