"""The trainer on a disk that fills: it waits before a checkpoint, or ends and goes on from the last complete one."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from standin.gate import Gate
from standin.small_disk import fill, small_disk
from standin.training import TRAIN, Trainee

from infra.drafter import trainer
from infra.drafter.checkpoint import SAVING, settle
from infra.drafter.progress import TrainProgress
from infra.drafter.trainer import train
from infra.drafter.trainer_entry import StoreTrainer
from infra.errors import DiskFull
from infra.machine.processes.guarded import recorded

SIZE = 64 << 20


class FullAfter:
    """A disk that gets full when so many steps are made, while the trainer stands still; a context manager."""

    def __init__(self, disk: Path, steps: int, leave: int) -> None:
        self._disk, self._steps, self._leave = disk, steps, leave
        self._gate, self._patch = Gate(disk.parent, steps), pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        self._patch.setattr(trainer, "PYTHON", self._gate.python)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def on_metrics(self, progress: TrainProgress) -> None:
        """Fill it, and let the trainer go on."""
        if progress.done == self._steps:
            fill(self._disk, self._leave)
            self._gate.open()


def test_it_waits_before_a_checkpoint_and_goes_on_by_itself(tmp_path: Path, trainee: Trainee) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        job = trainee.job(disk / "work", epochs=1, checkpoints_per_epoch=2)
        short = list[int]()

        def make_room(needs: int) -> None:
            short.append(needs)
            assert recorded(tmp_path / "run"), "the trainer lives while it waits"
            assert settle(job.checkpoints) == [], "the checkpoint that has no room is not begun"
            (disk / "ballast").unlink()

        with FullAfter(disk, 1, leave=1 << 19) as full:
            result = train(
                replace(job, free_bytes=1 << 20),
                trainee.samples,
                run_dir=tmp_path / "run",
                on_metrics=full.on_metrics,
                on_short=make_room,
            )
        assert len(short) == 1
        assert result.resumed_at == 0, "nothing was trained twice"
        assert result.steps == TRAIN // 2
        saved = sum(path.stat().st_size for path in result.checkpoint.iterdir())
        assert saved <= short[0] < 2 * saved, "it knew what it needs"


def test_a_full_disk_ends_it_and_it_goes_on_from_the_last_checkpoint(tmp_path: Path, trainee: Trainee) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        job = trainee.job(disk / "work", sequence_tokens=32)
        no_room = pytest.raises(DiskFull, match=r"the trainer found no room in .*/work after \d+ of 40 steps")
        with FullAfter(disk, TRAIN + 1, leave=0) as full, no_room:
            train(job, trainee.samples, run_dir=tmp_path / "run", on_metrics=full.on_metrics)
        assert recorded(tmp_path / "run") == []
        assert [(item.epoch, item.step) for item in settle(job.checkpoints)] == [(0, TRAIN)]

        (disk / "ballast").unlink()
        result = train(job, trainee.samples, run_dir=tmp_path / "run")
        assert result.resumed_at == TRAIN
        assert result.steps == len(result.history) == 2 * TRAIN


@pytest.mark.parametrize("words", ["No space left on device (os error 28)", "PytorchStreamWriter failed writing file"])
def test_a_checkpoint_that_found_no_room_in_the_end_leaves_nothing(tmp_path: Path, words: str) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        saving = _trainer(disk)

        def save(model: Any, optimizers: Any, epoch: int) -> None:
            folder = saving.checkpointer.path / str(epoch)
            folder.mkdir(parents=True)
            descriptor = os.open(folder / "model.safetensors", os.O_WRONLY | os.O_CREAT)
            try:
                os.posix_fallocate(descriptor, 0, 3 << 20)
            finally:
                os.close(descriptor)
            raise RuntimeError(words)

        saving.checkpointer.save_checkpoint = save
        with pytest.raises(DiskFull, match="there was no room for the checkpoint of"):
            saving.maybe_save_checkpoint(0)
        assert not (disk / SAVING).exists()


def test_another_failure_of_a_checkpoint_is_told_as_it_is(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        saving = _trainer(disk)

        def save(model: Any, optimizers: Any, epoch: int) -> None:
            raise RuntimeError("the optimiser has no state")

        saving.checkpointer.save_checkpoint = save
        with pytest.raises(RuntimeError, match="the optimiser has no state"):
            saving.maybe_save_checkpoint(0)


def _trainer(root: Path) -> Any:
    """A trainer of a model whose checkpoint takes about 2 MB, before it saves."""
    trainer: Any = object.__new__(StoreTrainer)
    trainer.checkpointer = SimpleNamespace(path=root)
    trainer.model = torch.nn.Linear(1024, 512, bias=False)
    trainer.optimizers, trainer.schedulers, trainer.free_bytes = [], [], 0
    trainer.config = SimpleNamespace(save_best=False, checkpoint_freq=0.5)
    return trainer
