"""What a measurement says of a server whose timing is known."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from statistics import fmean

import httpx
import pytest
from standin.answering import answering, pieces
from standin.waiting import wait_for

from infra.engines.client.bench import Run, interval, percentile, ratio_interval, run, summary
from infra.engines.client.client import Client, EngineSilent, RequestRefused, Sampling
from infra.engines.client.flights import Flights
from infra.engines.client.load import Timed
from infra.engines.vllm.dialect import VllmDialect
from infra.errors import EngineError

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
    # Beside other tests either process may wait for a core; these two show it most.
    assert measured.itl_p50 <= measured.itl_p95 <= 2 * percentile(sent["gaps"], 0.95)
    assert FIRST <= measured.ttft_p50 <= percentile(sent["first"], 0.5) + 3 * INTERVAL
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


@contextmanager
def refusing() -> Iterator[str]:
    """URL of a server that knows no completions."""
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Refusing(BaseHTTPRequestHandler):
    """404 to everything."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_a_closed_client_ends_a_load_at_once_and_says_which_requests_are_lost() -> None:
    flights, faults = Flights(), list[EngineError]()
    with answering() as engine:
        engine.stream = lambda payload: pieces(payload) if engine.release.wait() else iter(())
        client = Client(engine.url, VllmDialect(), timeout=600)

        def load() -> None:
            try:
                client.load([[1]] * 4, Sampling(5), concurrency=4, flights=flights)
            except EngineError as error:
                faults.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        wait_for(lambda: len(engine.requests) == 4, "all requests are in flight")
        assert flights.in_flight == 4
        client.close()
        thread.join(60)
    assert ["closed" in str(fault) for fault in faults] == [True]
    assert (flights.in_flight, len(flights.lost())) == (0, 4)


def test_a_request_that_is_refused_or_never_answered_ends_the_load() -> None:
    with answering() as engine:
        engine.stream = lambda payload: pieces(payload) if engine.release.wait() else iter(())
        with Client(engine.url, VllmDialect(), timeout=0.2) as client, pytest.raises(EngineSilent, match="was silent"):
            client.load([[1], [2]], Sampling(5), concurrency=2)
    with refusing() as url, Client(url, VllmDialect()) as client, pytest.raises(RequestRefused, match="404"):
        client.load([[1], [2]], Sampling(5), concurrency=2)
    with Client(url, VllmDialect()) as client, pytest.raises(EngineError, match="cannot be reached"):
        client.load([[1]], Sampling(5), concurrency=1)
