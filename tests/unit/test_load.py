"""What a measurement says of a server whose timing is known."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import httpx
import pytest

from infra.engines.client.bench import Run, interval, percentile, ratio_interval, run, summary
from infra.engines.client.client import Client, Sampling
from infra.engines.client.load import Timed
from infra.engines.vllm.dialect import VllmDialect

TICKING = Path(__file__).parents[1] / "standin" / "ticking.py"
INTERVAL, FIRST, TOKENS = 0.04, 0.1, 25


@pytest.fixture
def ticking() -> Iterator[str]:
    """URL of a server of known timing, in a process of its own."""
    command = [sys.executable, str(TICKING), str(INTERVAL), str(FIRST)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


def test_the_times_at_64_in_flight_are_the_servers(ticking: str) -> None:
    prompts = [[number] for number in range(20)]
    with Client(ticking, VllmDialect(), timeout=20) as client:
        single = run(client, prompts, sampling=Sampling(TOKENS), concurrency=64, seconds=2.0)
    measured = summary([single])
    sent = httpx.get(f"{ticking}/times", trust_env=False).json()
    assert measured.itl_p50 == pytest.approx(percentile(sent["gaps"], 0.5), rel=0.1)
    # Beside other tests either process may wait for a core, which the tail shows.
    assert measured.itl_p50 <= measured.itl_p95 <= 2 * percentile(sent["gaps"], 0.95)
    assert measured.ttft_p50 == pytest.approx(percentile(sent["first"], 0.5), abs=INTERVAL)
    # 20 prompts are asked again in turn until 64 have been in flight for two seconds.
    assert len(single.timed) >= 64 + 20
    assert measured.most_in_flight == 64
    assert measured.mean_in_flight == pytest.approx(64, rel=0.02)
    assert measured.steady_seconds >= 1.9
    answer_seconds = fmean(answer.end - answer.begin for answer in single.timed)
    assert measured.tokens_per_second == pytest.approx(64 * TOKENS / answer_seconds, rel=0.1)
    assert measured.client_lag >= 0


def timed(begin: float, *moments: float, tokens: int = 1, end: float | None = None) -> Timed:
    pieces = tuple((moment, tokens) for moment in moments)
    return Timed((1,), [7] * tokens * len(moments), begin, pieces, end or moments[-1], "length")


def test_ramp_up_and_drain_are_in_no_figure_of_speed() -> None:
    """Two at a time: A and B from 0, C takes A's place at 5, D takes B's at 6; C ends at 9 and nobody follows."""
    answers = [
        timed(0.0, 1.0, 2.0, 3.0, 4.0, 5.0),
        timed(0.0, 2.0, 3.0, 4.0, 5.0, 6.0),
        timed(5.0, 5.5, 7.0, 8.0, 9.0),
        timed(6.0, 6.5, 8.0, 10.0, 20.0),
    ]
    single = Run(answers, (0.0, 20.0), 2, None, [0.001])
    assert single.steady == (2.0, 9.0)
    assert single.tokens == 3 + 4 + 4 + 2
    assert single.rate == pytest.approx(13 / 7)
    assert single.in_flight[0] == (0.0, 1)
    assert max(count for _, count in single.in_flight) == 2
    measured = summary([single])
    assert measured.mean_in_flight == pytest.approx(2.0)
    assert measured.ttft_p95 == pytest.approx(0.5), "C and D alone were asked while both places answered"
    assert measured.itl_p99 == pytest.approx(1.5)
    assert (measured.output_tokens, measured.seconds, measured.steady_seconds) == (18, 20.0, 7.0)


def test_a_load_without_a_steady_state_counts_whole_and_says_so() -> None:
    single = Run([timed(0.0, 1.0, end=1.0), timed(0.0, 2.0, end=3.0)], (0.0, 3.0), 2, None, [0.001])
    measured = summary([single])
    assert single.steady is None
    hollow = Run([timed(0.0, 1.0, end=2.5), timed(0.0, 2.0, end=3.0)], (0.0, 3.0), 2, None, [0.001])
    assert hollow.steady is None, "no token came between the second's first and the first's end"
    assert measured.steady_seconds == 0
    assert measured.tokens_per_second == pytest.approx(2 / 3)


def test_intervals_of_repeated_runs_are_students() -> None:
    assert interval([5.0, 6.0]) is None
    low, high = interval([10.0, 12.0, 14.0]) or (0.0, 0.0)
    assert (low, high) == pytest.approx((12 - 4.303 * 2 / 3**0.5, 12 + 4.303 * 2 / 3**0.5))
    assert interval([3.0] * 20) == (3.0, 3.0)
    assert ratio_interval([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) == pytest.approx((2.0, 2.0))
    assert ratio_interval([1.0], [2.0]) is None
