"""Which sample is left out when servers die of it, and when it is the engine's own fault."""

from collections.abc import Callable
from contextlib import suppress
from typing import cast

import pytest

from infra.config.round import EngineConfig
from infra.engines.client.flights import Flights
from infra.errors import EngineError, ExtractionFault
from infra.round.serving import Serving
from infra.round.survival import TooManyDeaths, survive

SAMPLES = [f"s{number:02}" for number in range(12)]
IN_FLIGHT = 3
Deadly = Callable[[str, int, int], bool]
"""Whether a sample kills the n-th server when so many are in flight."""


class Step:
    """A step of 12 samples, three in flight at a time, on servers that die of what ``deadly`` says."""

    def __init__(self, deadly: Deadly, max_restarts: int = 3, share: float = 0.1) -> None:
        self.config = EngineConfig(max_restarts=max_restarts)
        self.engine, self.name = "vllm", "vllm-extract"
        self.flights = Flights()
        self.told: list[tuple[str, str]] = []
        self.done: set[str] = set()
        self.tried: list[str] = []
        self.starts = 0
        self.dead = False
        self._deadly = deadly
        self.quarantined: dict[str, str] = {}
        self._share = share

    def connect(self) -> None:
        self.starts, self.dead, self.flights = self.starts + 1, False, Flights()

    def work(self) -> None:
        open_ones = [name for name in SAMPLES if name not in self.done | set(self.quarantined)]
        for first in range(0, len(open_ones), IN_FLIGHT):
            group = open_ones[first : first + IN_FLIGHT]
            self.ask(*group)
            self.done.update(group)

    def trial(self, sample: str) -> None:
        self.tried.append(sample)
        self.ask(sample)

    def ask(self, *samples: str) -> None:
        self.dead = any(self._deadly(sample, self.starts, len(samples)) for sample in samples)
        for sample in samples:
            with suppress(EngineError), self.flights.of(sample):
                if self.dead:
                    raise EngineError("cannot be reached")
        if self.dead:
            raise EngineError("cannot be reached")

    def run(self) -> "Step":
        for attempt in survive(cast(Serving, self), len(SAMPLES), self._share):
            self.quarantined = attempt.quarantined
            with attempt:
                self.connect()
                for sample in attempt.suspects():
                    self.trial(sample)
                self.work()
        return self

    def death(self, error: EngineError) -> str | None:
        return "killed by signal 9" if self.dead else None

    def tell(self, what: str, text: str) -> None:
        self.told.append((what, text))

    def stop(self) -> None:
        assert self.dead


def test_the_sample_that_kills_is_found_among_those_in_flight_and_left_out() -> None:
    step = Step(lambda sample, *_: sample == "s04").run()
    assert step.done == set(SAMPLES) - {"s04"}
    assert step.quarantined == {"s04": "killed by signal 9"}
    assert step.starts == 3
    assert step.tried == ["s03", "s04", "s05"]
    assert [what for what, _ in step.told] == ["restart", "quarantine"]
    assert "sample s04 is left out" in step.told[1][1]


def test_a_server_that_dies_for_no_samples_fault_costs_a_restart_and_nothing_else() -> None:
    step = Step(lambda sample, server, _: sample == "s04" and server == 1).run()
    assert step.done == set(SAMPLES)
    assert step.quarantined == {}
    assert step.starts == 2
    assert [what for what, _ in step.told] == ["restart"]


def test_one_may_always_be_left_out_and_more_than_the_share_never() -> None:
    step = Step(lambda sample, *_: sample in ("s01", "s04"), share=0.01)
    with pytest.raises(TooManyDeaths, match=r"died on 2 samples, each alone: s01, s04.*at most 1 of them"):
        step.run()
    assert Step(lambda sample, *_: sample in ("s01", "s04"), share=0.2).run().done == set(SAMPLES) - {"s01", "s04"}


def test_an_engine_that_dies_of_everything_is_not_restarted_for_ever() -> None:
    with pytest.raises(TooManyDeaths, match="it is the engine rather than the samples"):
        Step(lambda sample, *_: True).run()
    # One that dies in company and never alone is no sample's fault.
    step = Step(lambda sample, server, together: sample == "s05" and together > 1, max_restarts=2)
    with pytest.raises(TooManyDeaths, match=r"died 3 times in this step.*at most 2 restarts"):
        step.run()
    assert step.quarantined == {}


def test_what_a_living_server_does_wrong_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(lambda sample, *_: False)

    def wrong() -> None:
        raise ExtractionFault("states of shape [3, 4]")

    monkeypatch.setattr(step, "work", wrong)
    with pytest.raises(ExtractionFault):
        step.run()
    assert step.starts == 1
