"""How long each step of this run took, and what the report should say of it."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from infra.results import StepTime
from infra.round.context import RoundContext
from infra.round.publication import published_prefix
from infra.round.serving import Serving


@dataclass
class Step:
    """One step while it runs.

    Attributes:
        reused: its result was there when this run came to it.
        resumed: a part of it was.
        retried: its task failed and was tried again, so its time is more than the work's.
        detail: a cell of the report.
    """

    name: str
    key: str
    reused: bool = False
    resumed: bool = False
    retried: bool = False
    detail: str = ""
    _came: bool = field(default=False, init=False)

    def came_to(self, *, whole: bool, part: bool = False, detail: str = "") -> None:
        """Say what was there when this run came to the step; every attempt of its task calls it, the first one counts.

        What a second attempt finds was made by the first: it is this run's own work.

        Args:
            whole: the step's result was there.
            part: some of it was.
            detail: a cell of the report.
        """
        if self._came:
            self.retried = True
        else:
            self._came, self.reused, self.resumed, self.detail = True, whole, part and not whole, detail


@dataclass
class Ledger:
    """The steps of this run of the round, in order, and what the report should say of them.

    Attributes:
        peak_bytes: most bytes the round held at once in store and scratch, as far as it was looked at.
        starts: seconds each engine took from launch to ready.
        restarts: seconds that servers started anew took, by profile; part of their step's time.
    """

    times: list[StepTime] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    restarts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    peak_bytes: int = 0

    def started(self, serving: Serving) -> None:
        """Note how long an engine took to start, and what its servers went through."""
        self.starts += serving.seconds_to_ready
        self.restarts[serving.profile] += sum(serving.seconds_to_ready[1:])
        # A hang is told again by what was done about it: the next rung, or a new start.
        self.notes += [event.text for event in serving.events if event.name != "server.hang"]

    def look_at_disk(self, context: RoundContext) -> None:
        """Measure what the round holds now."""
        published = sum(item.size for item in context.store.list(published_prefix(context)))
        self.peak_bytes = max(self.peak_bytes, context.disk.held_bytes() + published)

    @contextmanager
    def step(self, name: str, key: str = "") -> Iterator[Step]:
        """Time one step; an exception leaves no entry."""
        begin = time.monotonic()
        step = Step(name, key)
        yield step
        self.times.append(
            StepTime(
                step=name,
                key=key,
                seconds=time.monotonic() - begin,
                reused=step.reused,
                detail=step.detail,
                resumed=step.resumed,
                retried=step.retried,
            )
        )
