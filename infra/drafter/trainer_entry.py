"""What runs in the trainer's process: speculators' trainer, taught what it lacks.

``python -m infra.drafter.trainer_entry --events FILE --device cpu|cuda [arguments of ``speculators train``]``

The hidden states come from the store; every metric becomes a JSON line of FILE; a checkpoint appears whole or not at
all, and waits while it would leave less than ``--free-bytes`` on its file system; ``--max-steps`` ends the training; an
interrupt or a full disk ends the process with a failure. One line is one object with one of the keys ``plan``,
``train``, ``val``, ``room``, ``done``, ``error``.
"""

import argparse
import json
import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

# First: it registers the backend, and speculators' command line collects the backends' arguments when it is imported.
import infra.drafter.transfer  # noqa: F401  # isort: skip
from speculators.train import checkpointer, cli
from speculators.train import trainer as speculators_trainer
from speculators.train.config import TrainConfig
from speculators.train.distributed import get_rank, is_distributed

from infra.drafter.checkpoint import REPLACED, SAVING
from infra.drafter.progress import FULL, INTERRUPTED
from infra.errors import DiskFull
from infra.machine.disk import file_system, is_full

POLL_SECONDS = 1.0
SAY_EVERY = 10
"""Polls between two events that say that the trainer waits for room."""


class Events(logging.Handler):
    """Metrics and milestones of rank 0, one JSON line each, readable at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write a metric record of speculators (a mapping with ``train`` or ``val``)."""
        if isinstance(record.msg, dict) and ("train" in record.msg or "val" in record.msg):
            self.write({**record.msg, "global_step": getattr(record, "step", record.msg.get("global_step"))})

    def write(self, event: dict[str, Any]) -> None:
        """Append one event; ranks other than the first write nothing."""
        if get_rank() == 0:
            with self.path.open("a") as stream:
                stream.write(json.dumps(event) + "\n")

    def validated(self, epoch: int) -> bool:
        """Whether the validation of an epoch is among the events."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return any("val" in event and event.get("epoch") == epoch for event in map(json.loads, lines))


class StoreTrainer(speculators_trainer.Trainer):
    """speculators' trainer with an exact step budget, whole checkpoints and no silent interruption."""

    events: Events
    device: str
    free_bytes: int

    def run_training(self) -> None:
        """Train what is left of the plan, announce the plan first and the end last."""
        self.device_type = self.device
        # speculators saves in bfloat16 what it trains in float32: a training that goes on would not be the same one.
        exact = partial(self.checkpointer.save_checkpoint, float_dtype=next(self.model.parameters()).dtype)
        self.checkpointer.save_checkpoint = exact  # type: ignore[method-assign]
        steps = self._steps_by_epoch()
        self.config = self.config._replace(num_epochs=len(steps))
        self.events.write({"plan": {"steps": steps, "resumed_at": self.global_step, "epoch": self.current_epoch}})
        behind = min(self.current_epoch, len(steps)) - 1
        if behind >= 0 and self._resume_local_step == 0 and not self.events.validated(behind):
            # Killed after the epoch's last checkpoint and before its validation: the best checkpoint depends on it.
            self.maybe_update_best(behind, self.val_epoch(behind))
        super().run_training()
        self.events.write({"done": {"global_step": self.global_step}})

    def _steps_by_epoch(self) -> list[int]:
        """Steps of each epoch, cut where ``max_steps`` is reached (the packing of every epoch is known beforehand)."""
        steps: list[int] = []
        for epoch in range(self.config.num_epochs):
            left = (self.config.max_steps or sys.maxsize) - sum(steps)
            if left > 0:
                steps.append(min(left, len(self.train_loader.batch_sampler._generate_batches(epoch))))
        return steps

    def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
        """Save beside the checkpoints, then move into place: a kill leaves the earlier checkpoint or the new one.

        Raises:
            DiskFull: there was no room in the end; nothing of the new checkpoint is left.
        """
        if epoch == "interrupted":
            # The trainer would save what it cannot resume from and exit 0.
            raise SystemExit(INTERRUPTED)
        root, needs = self.checkpointer.path, self._checkpoint_bytes()
        self._wait_for_room(root, needs)
        try:
            self._save(root, epoch, local_step)
        except Exception as error:
            # torch tells a full disk as a failed write, without the system's number or words.
            if not is_full(error) and file_system(root).free >= needs:
                raise
            shutil.rmtree(root / SAVING, ignore_errors=True)
            raise DiskFull(f"there was no room for the checkpoint of {needs:,} bytes in {root}: {error}") from error

    def _save(self, root: Path, epoch: int | str, local_step: int) -> None:
        self.checkpointer.path = root / SAVING
        try:
            if get_rank() == 0:
                shutil.rmtree(root / SAVING, ignore_errors=True)
            super().maybe_save_checkpoint(epoch, local_step)
        finally:
            self.checkpointer.path = root
        if get_rank() == 0 and (root / SAVING / str(epoch)).is_dir():
            _swap_in(root, str(epoch))
        if is_distributed():
            torch.distributed.barrier()

    def _checkpoint_bytes(self) -> int:
        """Most that a checkpoint takes: all parameters (frozen ones may be left out) and the optimisers' state."""
        state = [
            value for optimizer in self.optimizers for entry in optimizer.state.values() for value in entry.values()
        ]
        moments = sum(value.numel() * value.element_size() for value in state if isinstance(value, torch.Tensor))
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters()) + moments

    def _wait_for_room(self, root: Path, needs: int) -> None:
        polls = 0
        while not self._has_room(root, needs):
            if polls % SAY_EVERY == 0:
                self.events.write({"room": {"short": needs}})
            polls += 1
            time.sleep(POLL_SECONDS)
        if polls:
            self.events.write({"room": {"short": 0}})

    def _has_room(self, root: Path, needs: int) -> bool:
        """Rank 0's judgement, which all ranks share: none of them may go into the save alone."""
        found = [file_system(root).free >= needs + self.free_bytes]
        if is_distributed():
            torch.distributed.broadcast_object_list(found, src=0)
        return found[0]


def _swap_in(root: Path, name: str) -> None:
    for path in (root / SAVING / name).iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    if (root / name).exists():
        os.rename(root / name, root / f"{REPLACED}{name}")
    os.rename(root / SAVING / name, root / name)
    shutil.rmtree(root / f"{REPLACED}{name}", ignore_errors=True)
    shutil.rmtree(root / SAVING, ignore_errors=True)


def use_cpu() -> None:
    """Point speculators' device look-ups at the CPU; it has no CPU mode of its own."""
    torch.accelerator.synchronize = lambda device=None: None
    speculators_trainer.get_local_rank = lambda: "cpu"  # type: ignore[assignment, return-value]
    checkpointer.get_current_device = lambda: "cpu"


def own_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the arguments that are ours, those of ``speculators train``)."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--free-bytes", type=int, default=0)
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Run one training to its end."""
    own, rest = own_arguments(arguments)
    events = Events(own.events)
    StoreTrainer.events, StoreTrainer.device, StoreTrainer.free_bytes = events, own.device, own.free_bytes
    cli.Trainer = StoreTrainer  # type: ignore[misc]
    setup = cli.setup_metric_logger

    def setup_with_events(**kwargs: Any) -> None:
        setup(**kwargs)
        logging.getLogger("speculators.metrics").addHandler(events)

    cli.setup_metric_logger = setup_with_events  # type: ignore[assignment]
    try:
        config = TrainConfig.resolve(rest)
        if own.device == "cpu":
            use_cpu()
        cli.main(config)
    except Exception as error:
        with suppress(OSError):  # on a full disk the exit status must do
            events.write({"error": {"type": type(error).__name__, "message": str(error)[-4000:]}})
        if is_full(error) or isinstance(error, DiskFull):
            _end_full()
        raise


def _end_full() -> NoReturn:
    """End with status ``FULL``, also when the log lies on the full disk: Python's own status would be 120 then."""
    with suppress(OSError):
        traceback.print_exc()
        sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    raise SystemExit(FULL)


if __name__ == "__main__":
    main(sys.argv[1:])
