"""Training a draft with speculators' trainer in a guarded process; what it does not say is checked afterwards."""

import errno
import importlib.metadata
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.config.keys import key12
from infra.config.training import TrainConfig
from infra.drafter.checkpoint import Checkpoint, best, settle, verify_draft
from infra.drafter.dataset import DatasetFacts, write_dataset
from infra.drafter.job import REPOSITORY, TrainJob, trainer_command
from infra.drafter.progress import FULL, INTERRUPTED, EventFile, StepMetrics, TrainingEvents, TrainProgress, Validation
from infra.drafter.start import kept_tokens, write_start
from infra.drafter.verifier import write_verifier
from infra.drafter.vocabulary import Vocabulary, choose_vocabulary, given_vocabulary, token_frequencies
from infra.errors import DiskFull, GateError, TrainingError
from infra.machine.gpus.choice import device_environment
from infra.machine.host import cpu_count
from infra.machine.logtail import last_lines
from infra.machine.processes.guarded import Guarded, Spec, clean_environment
from infra.store.objects import store_environment
from infra.store.samples import Sample

PYTHON = Path(sys.executable)
"""Has speculators."""
POLL_SECONDS = 0.25
STOP_SECONDS = 5.0
START_SECONDS = 1800.0
"""Imports, data and the first compilation may take so long before the first step, at least."""


class TrainerKilled(TrainingError):
    """A signal ended the trainer, most often the kernel's when memory runs out, or it hung; another attempt goes on."""


@dataclass(frozen=True)
class TrainResult:
    """A finished training.

    Args:
        checkpoint: folder of the draft whose held-out accuracies are best.
        steps: optimiser steps made in all.
        history: every step, in order.
        validations: the end of every epoch, in order.
        coverage: share of the supervised training tokens that the draft vocabulary holds.
        seconds: time in training steps, all attempts together.
        tokens_per_second: training tokens over ``seconds``.
        resumed_at: steps that an earlier attempt had made (0: none); resumptions: how many attempts went on from some.
        reused: the training was finished before; nothing ran.
    """

    checkpoint: Path
    steps: int
    history: tuple[StepMetrics, ...]
    validations: tuple[Validation, ...]
    coverage: float
    seconds: float
    tokens_per_second: float
    resumed_at: int
    resumptions: int
    reused: bool


def train(
    job: TrainJob,
    samples: Sequence[Sample],
    *,
    run_dir: Path,
    on_metrics: Callable[[TrainProgress], None] = lambda _: None,
    on_short: Callable[[int], None] = lambda _: None,
) -> TrainResult:
    """Train the draft, go on with a training that was killed, or return a finished one.

    Args:
        samples: all samples of the round in row order, training ones first.
        run_dir: folder of pid files.
        on_metrics: called with every step or every few; an exception from it ends the trainer.
        on_short: called when the trainer waits for room before a checkpoint, with the bytes that it needs; the trainer
            goes on by itself when there is room. An exception from it ends the trainer.

    Raises:
        ConfigError: the target is not one that the trainer can be handed.
        DiskFull: the trainer found no room; the complete checkpoints are kept, and the next call goes on from them.
        TrainerKilled: a signal ended the trainer or its guard, or it hung and was ended; the next call goes on from
            the last whole checkpoint.
        TrainingError: the trainer failed, or ended without what was asked for.
        GateError: no loss, NaN, dropped samples, interrupted, or too few steps.
    """
    check_devices(job.config, job.device)
    frequencies = token_frequencies(samples)
    vocabulary = _vocabulary(job, frequencies)
    job.workdir.mkdir(parents=True, exist_ok=True)
    facts = write_dataset(samples, job.dataset, vocabulary)
    _keep_or_clear(job, facts)
    checkpoints = settle(job.checkpoints)
    history = TrainingEvents()
    events = EventFile(job.events)
    events.mend()
    for event in events.new():
        history.take(event, check=False)
    reused = history.total > 0 and history.finished_at == history.total and bool(checkpoints)
    if not reused:
        write_verifier(job.target, job.verifier)
        if job.start is not None and not job.begun_with.is_dir():
            write_start(job.start, job.verifier, job.begun_with)
        _run(job, facts, run_dir, history, events, on_metrics, on_short)
        checkpoints = settle(job.checkpoints)
    return _result(job, history, checkpoints, vocabulary.coverage if vocabulary else 1.0, reused)


def _vocabulary(job: TrainJob, frequencies: Mapping[int, int]) -> Vocabulary | None:
    """What the draft can propose: as the draft to start from, else by how often the tokens are supervised."""
    whole = job.target.shape.vocab_size
    if job.start is None:
        return choose_vocabulary(frequencies, job.draft_vocab_size, whole)
    kept = kept_tokens(job.start)
    return given_vocabulary(kept.tolist(), frequencies, whole) if kept is not None else None


def check_devices(config: TrainConfig, device: str) -> None:
    """See that the trainer can use as many devices.

    Raises:
        TrainingError: it cannot.
    """
    if device == "cpu" and config.devices > 1:
        raise TrainingError("training on CPU uses one process", expected="train.devices: 1")


def _keep_or_clear(job: TrainJob, facts: DatasetFacts) -> None:
    """Clear what an earlier attempt with other inputs left in the folder."""
    inputs = key12(
        config=job.config.model_copy(update={"start": ""}),  # it counts by its digest
        target=job.target.revision,
        taps=list(job.taps),
        states=job.states_prefix,
        vocabulary=job.draft_vocab_size,
        dataset=facts.digest,
        device=job.device,
        devices=job.config.devices,  # decides how rows are packed
        speculators=importlib.metadata.version("speculators"),
        **({"start": job.start.digest} if job.start is not None else {}),
    )
    marker = job.workdir / "inputs.txt"
    if not marker.is_file() or marker.read_text() != inputs:
        for stale in (job.checkpoints, job.begun_with):
            shutil.rmtree(stale, ignore_errors=True)
        job.events.unlink(missing_ok=True)
        partial = marker.with_suffix(".partial")
        partial.write_text(inputs)
        os.replace(partial, marker)


def _run(
    job: TrainJob,
    facts: DatasetFacts,
    run_dir: Path,
    history: TrainingEvents,
    events: EventFile,
    on_metrics: Callable[[TrainProgress], None],
    on_short: Callable[[int], None],
) -> None:
    env = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if job.device == "cpu":
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(cpu_count()))
    if job.device == "cpu" or not job.config.compile:
        env["TORCH_COMPILE_DISABLE"] = "1"
    spec = Spec(
        command=trainer_command(job, facts, PYTHON),
        purpose=f"train {job.target.name}",
        log=job.log,
        env=clean_environment({**env, **device_environment(job.visible), **store_environment(job.states_url)}),
        cwd=job.workdir,
        grace_seconds=STOP_SECONDS,
    )
    with Guarded.start(spec, run_dir) as process:
        status, heard, limit = None, time.monotonic(), max(job.config.silence_seconds, START_SECONDS)
        while status is None:
            status = process.wait(timeout=POLL_SECONDS)
            if status is None and time.monotonic() - heard > limit:
                process.stop(grace_seconds=0.0)
                raise _hung(job, limit, history)
            if arrived := events.new():
                if any(event.keys() & {"train", "val"} for event in arrived):
                    limit = job.config.silence_seconds
                for event in arrived:
                    history.take(event)
                progress = history.progress()
                if progress is not None:
                    on_metrics(progress)
                if history.short:
                    on_short(history.short)
                heard = time.monotonic()  # it may have been held up for want of disk
    if status != 0 or history.error is not None or history.finished_at is None:
        raise _failure(job, status, history)


def _hung(job: TrainJob, silence: float, history: TrainingEvents) -> TrainerKilled:
    made = f"{max(history.steps, default=-1) + 1} of {history.total or 'unknown'} steps"
    return TrainerKilled(
        f"the trainer hung and was ended: silent for {silence:.0f} s after {made}",
        fix=f"read {job.log}; the next attempt resumes; for longer steps or validations raise train.silence_seconds",
    )


def _failure(job: TrainJob, status: int, history: TrainingEvents) -> Exception:
    kind, message = history.error or ("", "")
    made = max(history.steps, default=-1) + 1
    if status == FULL or kind == DiskFull.__name__:
        where = f"the trainer found no room in {job.workdir} after {made} of {history.total or 'unknown'} steps"
        # Another kind of error has the system's words for it, from whatever disk.
        place = job.workdir if kind in ("", DiskFull.__name__) else None
        return DiskFull(f"{where}: {message or os.strerror(errno.ENOSPC)}", place=place)
    if kind == "StatesMismatch":
        return GateError("training", message, expected="the samples' own tokens", fix="extract the round again")
    if status in (0, INTERRUPTED, -15):
        where = f"interrupted after {made} of {history.total or 'unknown'} steps"
        return GateError("training", where, expected="all steps", fix="start the round again; it goes on")
    said = f"{kind}: {message}" if kind else last_lines(job.log, 15) or "its log is empty"
    what = f"the trainer ended with status {status} after {made} steps: {said}"
    return (TrainerKilled if status < 0 else TrainingError)(what, fix=f"read {job.log}; the next attempt resumes")


def _result(
    job: TrainJob, history: TrainingEvents, checkpoints: Sequence[Checkpoint], coverage: float, reused: bool
) -> TrainResult:
    missing = [number for number in range(history.total) if number not in history.steps]
    if history.finished_at != history.total or missing or not history.total:
        raise GateError("training", f"{len(history.steps)} of {history.total} steps were made", expected="all of them")
    last_epoch = len(history.steps_by_epoch) - 1
    for epoch in range(last_epoch + 1):
        validation = history.validations.get(epoch)
        if epoch == last_epoch and validation is None:
            raise GateError("training", "the last epoch was not validated on held-out rows")
        if validation is not None and not (math.isfinite(validation.loss) and validation.loss > 0):
            what = f"the held-out loss after epoch {epoch + 1} is {validation.loss}"
            raise GateError("training", what, expected="a positive number")
    if not any(item.step == history.total and item.ends_epoch for item in checkpoints):
        raise GateError(
            "training", f"no checkpoint of step {history.total} in {job.checkpoints}", expected="the trained draft"
        )
    chosen = best(checkpoints, {epoch: sum(value.joint) for epoch, value in history.validations.items()})
    verify_draft(chosen.path, job.shape)
    steps = tuple(history.steps[number] for number in range(history.total))
    seconds = sum(step.seconds for step in steps)
    return TrainResult(
        checkpoint=chosen.path,
        steps=history.total,
        history=steps,
        validations=tuple(history.validations[epoch] for epoch in sorted(history.validations)),
        coverage=coverage,
        seconds=seconds,
        tokens_per_second=sum(step.tokens_per_second * step.seconds for step in steps) / seconds,
        resumed_at=history.resumed_at,
        resumptions=history.resumptions,
        reused=reused,
    )
