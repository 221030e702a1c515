"""The real trainer's own opening of the target, before anything is made for it.

speculators reads its arguments and the target's config in a process of its own (:mod:`infra.drafter.opening_entry`),
and builds the draft without weights. Whatever it refuses there, it would refuse when all states are extracted.
"""

import importlib.metadata
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.config.keys import key12
from infra.drafter.checkpoint import verify_config
from infra.drafter.job import REPOSITORY, TrainJob, trainer_arguments
from infra.drafter.verifier import write_verifier
from infra.engines.draft import read_config
from infra.errors import TrainingError
from infra.machine.logtail import last_lines
from infra.machine.processes.guarded import Guarded, Spec, clean_environment

SECONDS = 600.0
"""Longest wait: the process imports torch and speculators, which takes 10 s of a processor."""
RATIO = 0.9


def planned_draft(job: TrainJob, run_dir: Path, remembered: Path) -> Mapping[str, Any]:
    """config.json of the draft that this training would make.

    Args:
        job: the training; its folder is made and deleted here.
        run_dir: folder of pid files.
        remembered: folder that keeps what was found, by what decides it.

    Raises:
        ConfigError: the target is not one that the trainer can be handed.
        TrainingError: the trainer refuses the target or ``train.extra_args``, or would make another draft than the
            round describes.
    """
    job.workdir.mkdir(parents=True, exist_ok=True)
    try:
        write_verifier(job.target, job.verifier)
        path = remembered / f"{_key(job)}.json"
        config = _remembered(path)
        if config is None:
            config = _opened(job, run_dir)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{job.workdir.name}.partial")
            partial.write_text(json.dumps(config))
            partial.replace(path)
    finally:
        shutil.rmtree(job.workdir, ignore_errors=True)
    verify_config(config, job.shape, "the trainer would make another draft than the round describes: it")
    return config


def _opened(job: TrainJob, run_dir: Path) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(dir=job.workdir))
    further = job.config.extra_args
    spec = Spec(
        command=(
            *(sys.executable, "-m", "infra.drafter.opening_entry", str(folder), "--round-args", str(len(further))),
            *trainer_arguments(job, RATIO),
            *further,
        ),
        purpose=f"open {job.target.name} as the trainer does",
        log=folder / "opening.log",
        env=clean_environment({"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}),
        cwd=job.workdir,
    )
    with Guarded.start(spec, run_dir) as process:
        status = process.wait(timeout=SECONDS)
    if status != 0:
        said = "took too long" if status is None else last_lines(spec.log, 1) or f"ended with status {status}"
        raise TrainingError(
            f"the trainer cannot open target {job.target.name} with the round's `train`: {said}",
            expected="a target and arguments that `speculators train` takes",
            fix="correct train.extra_args" if further else "read its words; the target's config.json is what it read",
        )
    return read_config(folder)


def _key(job: TrainJob) -> str:
    return key12(
        verifier=(job.verifier / "config.json").read_text(),
        arguments=[text.replace(str(job.workdir), "") for text in trainer_arguments(job, RATIO)],
        further=list(job.config.extra_args),
        versions=[importlib.metadata.version(name) for name in ("speculators", "transformers")],
    )


def _remembered(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
