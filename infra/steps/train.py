"""The train step: speculators' trainer on the stored states, and the draft in the store."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from infra.drafter.checkpoint import publishable, settle
from infra.drafter.job import TrainJob
from infra.drafter.progress import StepMetrics, TrainProgress, Validation
from infra.drafter.trainer import TrainResult, train
from infra.progress import OnProgress, Progress
from infra.results import TRAINING, Training, TrainPoint
from infra.round.context import Round
from infra.round.states import extracted_samples
from infra.round.stored import point, training, write_result
from infra.units import duration

DATASET_TOKEN_BYTES = 24
"""A token in the trainer's dataset: id and mask in int64, and what lies beside them."""
HISTORY_POINTS = 400
"""Most points of the loss curve that are kept."""


def train_draft(round_: Round, on_progress: OnProgress) -> Training:
    """Train the round's draft (or go on with an attempt that was killed) and store it.

    Raises:
        TrainingError: the trainer failed.
        GateError: the training gate stops, or there was no room for longer than the disk budget waits.
    """
    done = training(round_)
    if done is not None:
        point(round_, "draft")
        return done
    result = _trained(round_, on_progress)
    out = round_.scratch / "draft" / round_.keys.draft
    folder = round_.disk.through(lambda: publishable(result.checkpoint, out, target_name(round_)))
    files, sizes = {}, {}
    for path in sorted(folder.iterdir()):
        round_.store.put(f"{round_.prefix('draft')}/{path.name}", path)
        files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        sizes[path.name] = path.stat().st_size
    round_.store.put(f"{round_.prefix('draft')}/trainer.log", workdir(round_) / "trainer.log")
    summary = _summary(round_, result, files, sizes)
    write_result(round_, "draft", TRAINING, summary)
    return summary


def _trained(round_: Round, on_progress: OnProgress) -> TrainResult:
    """Train to the end; a training that found the disk full goes on from its last checkpoint when there is room."""
    disk, samples = round_.disk, extracted_samples(round_)

    def attempt() -> TrainResult:
        disk.before("training", scratch=DATASET_TOKEN_BYTES * sum(len(sample.input_ids) for sample in samples))
        return train(
            _job(round_),
            samples,
            run_dir=round_.settings.run_dir,
            on_metrics=_reporter(on_progress),
            on_short=lambda needs: disk.before("a checkpoint", scratch=needs),
        )

    return disk.through(attempt)


def target_name(round_: Round) -> str:
    """What the published draft calls its target: the hub id where there is one."""
    source = round_.config.target.source
    return source.removeprefix("hf://").split("@")[0] if source.startswith("hf://") else round_.target.name


def workdir(round_: Round) -> Path:
    """Folder of this training's attempts."""
    return round_.scratch / f"train-{round_.keys.draft}"


def begun(round_: Round) -> bool:
    """Whether an attempt left a checkpoint to go on from."""
    return bool(settle(workdir(round_) / "checkpoints"))


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
        free_bytes=round_.config.budget.free_bytes,
        visible=round_.devices if training_device(round_) == "cuda" else (),
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


def _summary(round_: Round, result: TrainResult, files: dict[str, str], sizes: dict[str, int]) -> Training:
    stride = max(1, len(result.history) // HISTORY_POINTS)
    ends = _epoch_ends(result.history)
    vocabulary = round_.config.prepare.draft_vocab_size or round_.target.shape.vocab_size
    return Training(
        steps=result.steps,
        epochs=len(result.validations),
        seconds=result.seconds,
        tokens=round(result.tokens_per_second * result.seconds),
        resumed=result.resumptions,
        history=tuple(_point(step.step, step) for step in result.history[::stride]),
        validation=tuple(_point(ends[item.epoch], item) for item in result.validations),
        trainer_version=round_.versions["speculators"],
        draft_vocab_size=min(vocabulary, round_.target.shape.vocab_size),
        coverage=result.coverage,
        files=files,
        sizes=sizes,
    )


def _epoch_ends(history: tuple[StepMetrics, ...]) -> dict[int, int]:
    return {step.epoch: step.step for step in history}


def _point(step: int, metrics: StepMetrics | Validation) -> TrainPoint:
    return TrainPoint(step=step, loss=metrics.loss, accuracy=metrics.joint)
