"""Which steps are done, judged by verified files only, and how long each took."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from infra.errors import StoreError
from infra.results import REPORT, TRAINING, Evaluation, Report, Result, StepTime, Training
from infra.round.context import Round
from infra.round.serving import Serving
from infra.steps.extract import faulty_shards
from infra.steps.generate import answers_done
from infra.steps.prepare import samples_done
from infra.steps.publish import publication_done, published_prefix
from infra.store.stored import read_stored, whole

EVALUATION = "evaluation.json"


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
        self.notes += [notice.text for notice in serving.notices if notice.what != "hang"]

    def look_at_disk(self, round_: Round) -> None:
        """Measure what the round holds now."""
        published = sum(item.size for item in round_.store.list(published_prefix(round_)))
        self.peak_bytes = max(self.peak_bytes, round_.disk.held_bytes() + published)

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


MADE_FROM = {"samples": ("answers",), "draft": ("hidden",), "eval": ("draft",), "published": ("draft", "hidden")}
"""Which earlier steps' keys a pointer names, so that retention can follow the chain."""


def point(round_: Round, step: str) -> None:
    """Make this round's key the step's live one, unless it is; hidden states have :func:`make_live` instead."""
    key = getattr(round_.keys, step)
    with suppress(StoreError):  # a damaged pointer is written anew
        live = round_.rounds.current(step)
        if live is not None and live.key == key:
            return
    made: dict[str, object] = {"versions": round_.versions}
    made |= {earlier: getattr(round_.keys, earlier) for earlier in MADE_FROM.get(step, ())}
    round_.rounds.point(step, key, made)


def write_result(round_: Round, step: str, name: str, result: Result) -> None:
    """Store a step's result; it is what makes the step done, so it goes last."""
    round_.store.put(f"{round_.prefix(step)}/{name}", result.model_dump_json(indent=1).encode())
    point(round_, step)


def training_if_done(round_: Round) -> Training | None:
    """The training result of this key, if the draft's files are whole."""
    prefix = round_.prefix("draft")
    result = read_stored(round_.store, f"{prefix}/{TRAINING}", Training)
    if result is None:
        return None
    return result if whole(round_.store, prefix, result.files, result.sizes) else None


def evaluation_if_done(round_: Round) -> Evaluation | None:
    """The evaluation of this key."""
    return read_stored(round_.store, f"{round_.prefix('eval')}/{EVALUATION}", Evaluation)


def report_if_done(round_: Round) -> Report | None:
    """The report of this key."""
    return read_stored(round_.store, f"{round_.prefix('report')}/{REPORT}", Report)


def done_steps(round_: Round) -> set[str]:
    """Names of the steps whose results are there and verify (sizes and hashes of small files; not every checksum)."""
    samples = samples_done(round_)
    training = training_if_done(round_)
    checks = {
        "answers": samples or answers_done(round_),
        "samples": samples,
        "hidden": samples and (training is not None or not faulty_shards(round_, deep=False)),
        "draft": training is not None,
        "eval": evaluation_if_done(round_) is not None,
        "published": publication_done(round_),
        "report": report_if_done(round_) is not None,
    }
    return {name for name, done in checks.items() if done}
