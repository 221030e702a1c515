"""How far a long step is, in a form that logs and the UI can show."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from infra.units import duration


@dataclass(frozen=True)
class Progress:
    """A moment in a long step.

    Attributes:
        done: units finished, what an earlier attempt finished included.
        total: units in all.
        rate: units of ``per`` a second since this attempt began.
        left: seconds until the end at this rate, None when unknown.
        text: one line for people.
    """

    done: int
    total: int
    rate: float
    left: float | None
    text: str


OnProgress = Callable[[Progress], None]


class Meter:
    """Counts units and tokens of this attempt and says how long the rest takes."""

    def __init__(self, what: str, total: int, done: int, report: OnProgress | None) -> None:
        self._what, self._total, self._done, self._first = what, total, done, done
        self._tokens = 0
        self._report = report
        self._begin = time.monotonic()

    def add(self, units: int, tokens: int) -> None:
        """Count finished work and report it."""
        self._done += units
        self._tokens += tokens
        if self._report is not None:
            self._report(self.now())

    def now(self) -> Progress:
        """The present state."""
        seconds = max(time.monotonic() - self._begin, 1e-9)
        speed = (self._done - self._first) / seconds
        left = (self._total - self._done) / speed if speed > 0 else None
        rate = self._tokens / seconds
        remaining = f", {duration(left)} left" if left is not None else ""
        text = f"{self._what} {self._done}/{self._total}, {rate:,.0f} tokens/s{remaining}"
        return Progress(self._done, self._total, rate, left, text)
