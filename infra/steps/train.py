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
from infra.round.context import RoundContext
from infra.round.states import extracted_samples
from infra.round.stored import point, training, write_result
from infra.units import duration

DATASET_TOKEN_BYTES = 24
"""A token in the trainer's dataset: id and mask in int64, and what lies beside them."""
HISTORY_POINTS = 400
"""Most points of the loss curve that are kept."""


def train_draft(context: RoundContext, on_progress: OnProgress) -> Training:
    """Train the round's draft (or go on with an attempt that was killed) and store it.

    Raises:
        TrainingError: the trainer failed.
        GateError: the training gate stops, or there was no room for longer than the disk budget waits.
    """
    done = training(context)
    if done is not None:
        point(context, "draft")
        return done
    result = _trained(context, on_progress)
    out = context.scratch / "draft" / context.keys.draft
    folder = context.disk.through(lambda: publishable(result.checkpoint, out, target_name(context)))
    files, sizes = {}, {}
    for path in sorted(folder.iterdir()):
        context.store.put(f"{context.prefix('draft')}/{path.name}", path)
        files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        sizes[path.name] = path.stat().st_size
    context.store.put(f"{context.prefix('draft')}/trainer.log", workdir(context) / "trainer.log")
    summary = _summary(context, result, files, sizes)
    write_result(context, "draft", TRAINING, summary)
    return summary


def _trained(context: RoundContext, on_progress: OnProgress) -> TrainResult:
    """Train to the end; a training that found the disk full goes on from its last checkpoint when there is room."""
    disk, samples = context.disk, extracted_samples(context)

    def attempt() -> TrainResult:
        disk.before("training", scratch=DATASET_TOKEN_BYTES * context.samples.tokens)
        return train(
            _job(context),
            samples,
            run_dir=context.settings.run_dir,
            on_metrics=_reporter(on_progress),
            on_short=lambda needs: disk.before("a checkpoint", scratch=needs),
        )

    return disk.through(attempt)


def target_name(context: RoundContext) -> str:
    """What the published draft calls its target: the hub id where there is one."""
    source = context.config.target.source
    return source.removeprefix("hf://").split("@")[0] if source.startswith("hf://") else context.target.name


def workdir(context: RoundContext) -> Path:
    """Folder of this training's attempts."""
    return context.scratch / f"train-{context.keys.draft}"


def begun(context: RoundContext) -> bool:
    """Whether an attempt left a checkpoint to go on from."""
    return bool(settle(workdir(context) / "checkpoints"))


def _job(context: RoundContext) -> TrainJob:
    return TrainJob(
        config=context.config.train,
        target=context.target,
        device=training_device(context),
        taps=context.config.extract.taps,
        states_url=context.settings.store,
        states_prefix=context.prefix("hidden"),
        draft_vocab_size=context.config.prepare.draft_vocab_size,
        workdir=workdir(context),
        free_bytes=context.config.budget.free_bytes,
        visible=context.devices if training_device(context) == "cuda" else (),
        start=context.start,
    )


def training_device(context: RoundContext) -> Literal["cpu", "cuda"]:
    """Where the trainer runs: where the extracting engine ran."""
    return context.extracting.device


def _reporter(on_progress: OnProgress) -> Callable[[TrainProgress], None]:
    def report(progress: TrainProgress) -> None:
        accuracy = " / ".join(f"{100 * value:.1f}" for value in progress.last.joint)
        text = (
            f"step {progress.done}/{progress.total}, loss {progress.last.loss:.3f}, accuracy {accuracy} %, "
            f"{progress.tokens_per_second:,.0f} tokens/s, {duration(progress.seconds_left)} left"
        )
        on_progress(Progress(progress.done, progress.total, progress.tokens_per_second, progress.seconds_left, text))

    return report


def _summary(context: RoundContext, result: TrainResult, files: dict[str, str], sizes: dict[str, int]) -> Training:
    stride = max(1, len(result.history) // HISTORY_POINTS)
    ends = _epoch_ends(result.history)
    vocabulary = context.config.prepare.draft_vocab_size or context.target.shape.vocab_size
    return Training(
        steps=result.steps,
        epochs=len(result.validations),
        seconds=result.seconds,
        tokens=round(result.tokens_per_second * result.seconds),
        resumed=result.resumptions,
        history=tuple(_point(step.step, step) for step in result.history[::stride]),
        validation=tuple(_point(ends[item.epoch], item) for item in result.validations),
        trainer_version=context.versions["speculators"],
        draft_vocab_size=min(vocabulary, context.target.shape.vocab_size),
        coverage=result.coverage,
        start=context.start.words if context.start is not None else "",
        files=files,
        sizes=sizes,
    )


def _epoch_ends(history: tuple[StepMetrics, ...]) -> dict[int, int]:
    return {step.epoch: step.step for step in history}


def _point(step: int, metrics: StepMetrics | Validation) -> TrainPoint:
    return TrainPoint(step=step, loss=metrics.loss, accuracy=metrics.joint)
