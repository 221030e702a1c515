"""The train step: speculators' trainer on the stored states, and the draft in the store."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from infra.drafter.checkpoint import publishable
from infra.drafter.progress import StepMetrics, TrainProgress, Validation
from infra.drafter.trainer import TrainJob, TrainResult, train
from infra.steps.context import Round
from infra.steps.ledger import TRAINING, point, training_if_done, write_result
from infra.steps.progress import OnProgress, Progress, duration
from infra.steps.results import Training, TrainPoint

HISTORY_POINTS = 400
"""Most points of the loss curve that are kept."""


def train_draft(round_: Round, on_progress: OnProgress) -> Training:
    """Train the round's draft (or go on with an attempt that was killed) and store it.

    Raises:
        TrainingError: the trainer failed.
        GateError: the training gate stops.
    """
    done = training_if_done(round_)
    if done is not None:
        point(round_, "draft")
        return done
    result = train(_job(round_), round_.samples, run_dir=round_.settings.run_dir, on_metrics=_reporter(on_progress))
    folder = publishable(result.checkpoint, round_.scratch / "draft" / round_.keys.draft, target_name(round_))
    files = {}
    for path in sorted(folder.iterdir()):
        round_.store.put(f"{round_.prefix('draft')}/{path.name}", path)
        files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    round_.store.put(f"{round_.prefix('draft')}/trainer.log", workdir(round_) / "trainer.log")
    training = _summary(round_, result, files)
    write_result(round_, "draft", TRAINING, training)
    return training


def target_name(round_: Round) -> str:
    """What the published draft calls its target: the hub id where there is one."""
    source = round_.config.target.source
    return source.removeprefix("hf://").split("@")[0] if source.startswith("hf://") else round_.target.name


def workdir(round_: Round) -> Path:
    """Folder of this training's attempts."""
    return round_.scratch / f"train-{round_.keys.draft}"


def _job(round_: Round) -> TrainJob:
    return TrainJob(
        config=round_.config.train,
        target=round_.target,
        device=training_device(round_),
        taps=round_.config.extract.taps,
        states_url=round_.settings.store,
        states_prefix=round_.prefix("hidden"),
        draft_vocab_size=round_.config.prepare.draft_vocab_size,
        workdir=workdir(round_),
    )


def training_device(round_: Round) -> Literal["cpu", "cuda"]:
    """Where the trainer runs: where the extracting engine ran."""
    return round_.extracting.device


def _reporter(on_progress: OnProgress) -> Callable[[TrainProgress], None]:
    def report(progress: TrainProgress) -> None:
        accuracy = " / ".join(f"{100 * value:.1f}" for value in progress.last.joint)
        text = (
            f"step {progress.done}/{progress.total}, loss {progress.last.loss:.3f}, accuracy {accuracy} %, "
            f"{progress.tokens_per_second:,.0f} tokens/s, {duration(progress.seconds_left)} left"
        )
        on_progress(Progress(progress.done, progress.total, progress.tokens_per_second, progress.seconds_left, text))

    return report


def _summary(round_: Round, result: TrainResult, files: dict[str, str]) -> Training:
    stride = max(1, len(result.history) // HISTORY_POINTS)
    ends = _epoch_ends(result.history)
    vocabulary = round_.config.prepare.draft_vocab_size or round_.target.shape.vocab_size
    return Training(
        steps=result.steps,
        epochs=len(result.validations),
        seconds=result.seconds,
        tokens=round(result.tokens_per_second * result.seconds),
        resumed=int(result.resumed_at > 0),
        history=tuple(_point(step.step, step) for step in result.history[::stride]),
        validation=tuple(_point(ends[item.epoch], item) for item in result.validations),
        trainer_version=round_.versions["speculators"],
        draft_vocab_size=min(vocabulary, round_.target.shape.vocab_size),
        files=files,
    )


def _epoch_ends(history: tuple[StepMetrics, ...]) -> dict[int, int]:
    return {step.epoch: step.step for step in history}


def _point(step: int, metrics: StepMetrics | Validation) -> TrainPoint:
    return TrainPoint(step=step, loss=metrics.loss, accuracy=metrics.joint)
