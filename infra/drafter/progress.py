"""What the trainer says while it runs: its events as figures, and the faults that show in them."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.errors import GateError

INTERRUPTED = 75
"""Exit status of a trainer that was told to end."""

FULL = 76
"""Exit status of a trainer that found the disk full."""

ZERO_LOSSES = 3
"""So many steps in a row without any loss are no accident of one pack."""

RECENT_STEPS = 50


@dataclass(frozen=True)
class StepMetrics:
    """One optimiser step, counted from 0; accuracies are by draft step."""

    step: int
    epoch: int
    loss: float
    joint: tuple[float, ...]
    conditional: tuple[float, ...]
    learning_rate: float
    tokens_per_second: float
    seconds: float
    dropped: float


@dataclass(frozen=True)
class Validation:
    """Figures over the held-out rows at the end of an epoch; accuracies are by draft step."""

    epoch: int
    loss: float
    joint: tuple[float, ...]
    conditional: tuple[float, ...]


@dataclass(frozen=True)
class TrainProgress:
    """Where a training stands.

    Args:
        done: optimiser steps made, all attempts together.
        total: steps of the whole training.
        tokens_per_second: over the last steps.
        seconds_left: at the rate of the last steps, validation apart.
        last: the latest step.
        validation: the latest validation, if any.
    """

    done: int
    total: int
    tokens_per_second: float
    seconds_left: float
    last: StepMetrics
    validation: Validation | None


@dataclass
class TrainingEvents:
    """All events of a training, over its attempts: a step made twice counts as it was made last.

    Attributes:
        resumed_at: steps that were there when the last attempt began.
        resumptions: attempts that began with some.
        short: bytes for which the trainer waits before its next checkpoint; 0 when it does not wait.
    """

    steps: dict[int, StepMetrics] = field(default_factory=dict)
    validations: dict[int, Validation] = field(default_factory=dict)
    steps_by_epoch: tuple[int, ...] = ()
    resumed_at: int = 0
    resumptions: int = 0
    finished_at: int | None = None
    short: int = 0
    error: tuple[str, str] | None = None

    @property
    def total(self) -> int:
        """Steps of the whole training; 0 before the trainer has planned."""
        return sum(self.steps_by_epoch)

    def take(self, event: dict[str, Any], *, check: bool = True) -> None:
        """Take in one event.

        Args:
            check: stop at faults; events of an attempt that has ended are taken as they are.

        Raises:
            GateError: the event shows a fault that no later step can mend.
        """
        if "plan" in event:
            self._start_attempt(event["plan"])
        elif "train" in event:
            step = _step(event)
            self.steps[step.step] = step
            if check:
                self._check(step)
        elif "val" in event:
            self.validations[event["epoch"]] = _validation(event)
        elif "room" in event:
            self.short = event["room"]["short"]
        elif "done" in event:
            self.finished_at = event["done"]["global_step"]
        elif "error" in event:
            self.error = (event["error"]["type"], event["error"]["message"])

    def progress(self) -> TrainProgress | None:
        """Where the training stands, or None before its first step."""
        if not self.steps:
            return None
        last = self.steps[max(self.steps)]
        recent = [self.steps[number] for number in sorted(self.steps)[-RECENT_STEPS:]]
        seconds = sum(step.seconds for step in recent) or math.inf
        rate = len(recent) / seconds
        tokens = sum(step.tokens_per_second * step.seconds for step in recent) / seconds
        latest = self.validations[max(self.validations)] if self.validations else None
        done = last.step + 1
        left = (self.total - done) / rate if rate else math.inf
        return TrainProgress(done, self.total, tokens, left, last, latest)

    def _start_attempt(self, plan: dict[str, Any]) -> None:
        self.steps_by_epoch = tuple(plan["steps"])
        self.resumed_at = plan["resumed_at"]
        self.resumptions += self.resumed_at > 0
        self.finished_at, self.short, self.error = None, 0, None
        self.steps = {number: step for number, step in self.steps.items() if number < self.resumed_at}
        self.validations = {epoch: value for epoch, value in self.validations.items() if epoch < plan["epoch"]}

    def _check(self, step: StepMetrics) -> None:
        where = f"step {step.step + 1} of {self.total}"
        if not math.isfinite(step.loss):
            raise GateError(
                "training",
                f"the loss is {step.loss} at {where}",
                expected="a number",
                fix="lower train.learning_rate; if it is so from the first step, look for NaN in the hidden states",
            )
        if step.dropped:
            raise GateError(
                "training",
                f"the trainer dropped {step.dropped:.0f} samples at {where}",
                expected="none dropped",
                fix="extract the hidden states again: they do not match the samples",
            )
        latest = [self.steps.get(step.step - back) for back in range(ZERO_LOSSES)]
        if all(item is not None and item.loss == 0.0 for item in latest):
            raise GateError(
                "training",
                f"the loss was 0 for {ZERO_LOSSES} steps up to {where}",
                expected="supervised tokens in every pack",
                fix="check the loss masks, and that train.sequence_tokens is not shorter than the prompts",
            )


class EventFile:
    """The trainer's JSON lines, read as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def mend(self) -> None:
        """Cut off what a killed trainer left of a line."""
        if self.path.exists():
            data = self.path.read_bytes()
            with self.path.open("r+b") as stream:
                stream.truncate(data.rfind(b"\n") + 1)

    def new(self) -> list[dict[str, Any]]:
        """Events since the last call; a line that is still being written waits."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as stream:
            stream.seek(self._offset)
            data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def _step(event: dict[str, Any]) -> StepMetrics:
    metrics, profile, rate = event["train"], event["profile"], event["lr"]
    return StepMetrics(
        step=event["global_step"],
        epoch=event["epoch"],
        loss=metrics["loss"],
        joint=_by_step(metrics, "full_acc_{}"),
        conditional=_by_step(metrics, "cond_acc_{}"),
        learning_rate=max(rate.values()) if isinstance(rate, dict) else rate,
        tokens_per_second=profile["tokens_per_s"],
        seconds=profile["step_ms"] / 1000,
        dropped=metrics["error_records"],
    )


def _validation(event: dict[str, Any]) -> Validation:
    metrics = event["val"]
    return Validation(
        event["epoch"],
        metrics.get("loss_epoch", math.nan),
        _by_step(metrics, "full_acc_{}_epoch"),
        _by_step(metrics, "cond_acc_{}_epoch"),
    )


def _by_step(metrics: dict[str, float], name: str) -> tuple[float, ...]:
    values: list[float] = []
    while (value := metrics.get(name.format(len(values)))) is not None:
        values.append(value)
    return tuple(values)
