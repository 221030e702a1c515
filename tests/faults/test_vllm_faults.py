"""The real vLLM on CPU: a rung that cannot work, an engine that is stopped, an API server that is killed alone."""

import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from standin.processes import running
from standin.waiting import wait_for

from infra.config.load import build_round, load_round, round_file
from infra.config.settings import Settings
from infra.machine.processes.guarded import recorded
from infra.round.context import RoundContext
from infra.round.serving import Serving
from infra.round.states import faulty_shards, shards_of
from infra.round.survival import survive
from infra.steps import extract as steps
from infra.store.samples import Sample, write_samples

pytestmark = pytest.mark.timeout(900)

SAMPLES = 400
SILENCE = 15.0
LIMIT = 600.0


@pytest.fixture
def context(tmp_path: Path, models: Path) -> RoundContext:
    """Samples of the real small target, to be extracted in seven shards; the ladder's first rung cannot work."""
    tiny = load_round(round_file("tiny"))
    ladder = [{"name": "impossible", "flags": ["--no-such-flag"]}, {"name": "eager", "flags": ["--enforce-eager"]}]
    config = build_round(
        tiny.model_dump(mode="json"),
        {
            "extract.concurrency": 2,
            "extract.shard_bytes": 16 << 20,
            "engines.vllm.ladder": ladder,
            "engines.vllm.silence_seconds": SILENCE,
        },
    )
    made = RoundContext(config, Settings(state_dir=tmp_path / "state", models_path=models))
    write_samples(made.store, made.prefix("samples"), [sample(row) for row in range(SAMPLES)])
    return made


def sample(row: int) -> Sample:
    tokens = [1, *(1000 + (row * 131 + place * 7) % 20000 for place in range(60))]
    split = "train" if row < SAMPLES - 10 else "heldout"
    return Sample(row, f"s{row}", [], tokens, [0] * 30 + [1] * 31, split, "stop", "none", {})  # type: ignore[arg-type]


def processes(context: RoundContext) -> tuple[psutil.Process, list[psutil.Process]]:
    """(API server, its engine's processes) of the one server that runs."""
    [record] = [record for record in recorded(context.settings.run_dir) if record.alive]
    server = psutil.Process(record.child_pid)
    return server, server.children(recursive=True)


class EngineVandal(threading.Thread):
    """Stops the engine after the first shard, and kills the API server alone after the third."""

    def __init__(self, context: RoundContext, serving: Serving) -> None:
        super().__init__(daemon=True)
        self.round, self.serving = context, serving
        self.said: list[str] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._shards(1)
            _, engine = processes(self.round)
            assert engine
            for process in engine:
                process.send_signal(signal.SIGSTOP)
            self._until_serving_again("stopped engine", engine, 2)
            self._shards(3)
            server, engine = processes(self.round)
            server.kill()
            self._until_serving_again("API server killed alone", engine, 3)
        except BaseException as error:
            self.error = error

    def _until_serving_again(self, what: str, engine: list[psutil.Process], servers: int) -> None:
        begin, flights = time.monotonic(), self.serving.flights
        wait_for(lambda: self._restarts() == servers - 1, f"{what}: noticed", LIMIT)
        noticed = time.monotonic() - begin
        wait_for(lambda: len(self.serving.seconds_to_ready) == servers, f"{what}: ready again", LIMIT)
        assert not any(map(running, engine)), "the engine outlived its server"
        wait_for(
            lambda: self.serving.flights is not flights and self.serving.flights.landed > 0, f"{what}: serving", LIMIT
        )
        self.said.append(f"{what}: noticed after {noticed:.1f} s, serving again after {time.monotonic() - begin:.1f} s")

    def _restarts(self) -> int:
        return sum(event.name == "server.restart" for event in self.serving.events)

    def _shards(self, count: int) -> None:
        left = len(shards_of(self.round)) - count
        wait_for(lambda: len(faulty_shards(self.round, deep=False)) <= left, f"{count} shards", LIMIT)


def test_extraction_goes_on_after_a_bad_rung_a_stopped_engine_and_a_killed_server(
    context: RoundContext, capsys: pytest.CaptureFixture[str]
) -> None:
    todo = shards_of(context)
    assert len(todo) >= 5
    with Serving(context, "extract") as serving:
        vandal = EngineVandal(context, serving)
        vandal.start()
        quarantined: dict[str, str] = {}
        for attempt in survive(serving, SAMPLES, 0.01):
            quarantined = attempt.quarantined
            with attempt:
                extractor = serving.extractor(600)
                for sample in attempt.suspects():
                    steps.try_sample(context, extractor, serving.flights, sample)
                with steps.Extraction(context, extractor, serving.flights, todo, quarantined) as extraction:
                    while todo:
                        extraction.shard(todo[0])
                        del todo[0]
        vandal.join(LIMIT)
    if vandal.error is not None:
        raise vandal.error
    with capsys.disabled():
        print("", *vandal.said, f"starts: {[round(seconds) for seconds in serving.seconds_to_ready]} s", sep="\n  ")

    assert faulty_shards(context, deep=True) == {}
    assert quarantined == {}
    told = [event.name.removeprefix("server.") for event in serving.events]
    assert told == ["rung", "hang", "restart", "remembered", "restart", "remembered"]
    assert "--no-such-flag" in serving.events[0].text
    assert "its token counters stand still" in serving.events[1].text or "neither" in serving.events[1].text
    assert Path(serving.events[1].text.rpartition("evidence: ")[2]).is_file()
    assert recorded(context.settings.run_dir) == []
