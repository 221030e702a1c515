"""Whole rounds on a small disk that fills in generate, extract and train, each in a process of its own.

The test is the other process: it fills the disk, sees the pause in the round's log, and makes room again. Where a
write finds the disk full, ``make test`` has the store's own tests and the trainer's (``tests/faults``).
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from standin.instead import instead_of_vllm
from standin.machine import REPOSITORY, Machine, new_machine
from standin.processes import living
from standin.small_disk import fill, small_disk
from standin.waiting import more, wait_for

from infra.round.states import faulty_shards
from infra.round.status import look
from infra.round.stored import report as stored_report
from infra.store.answers import read_answers

pytestmark = pytest.mark.timeout(900)

LIMIT = 1500.0
SAMPLES = 24
SIZE = 64 << 20
LOW_WATER = 2 << 20
PAUSED = re.compile(r"paused before (.+?): ")
RESUMED = re.compile(r"paused .* before (.+?) for want of disk")
ALL_STEPS = {"answers", "samples", "hidden", "draft", "eval", "published", "report"}


@dataclass(frozen=True)
class SmallMachine(Machine):
    """A machine whose store and scratch lie on a small disk; state, logs and target do not."""

    disk: Path

    @property
    def environment(self) -> dict[str, str]:
        """As every machine's, with the small disk."""
        places = {"EAGLE3_STORE_URL": f"file://{self.disk}/store", "EAGLE3_SCRATCH_PATH": f"{self.disk}/scratch"}
        return super().environment | places

    @property
    def log(self) -> str:
        """What the round's process wrote."""
        path = self.folder / "flow.log"
        return path.read_text() if path.exists() else ""

    def pauses(self) -> int:
        """How often the round has paused."""
        return len(PAUSED.findall(self.log))

    def resumptions(self) -> int:
        """How often it has gone on."""
        return len(RESUMED.findall(self.log))

    def trained(self) -> int:
        """Training steps made, by the trainer's own log."""
        logs = list(self.disk.glob("scratch/small/train-*/events.jsonl"))
        return sum('"train"' in line for line in logs[0].read_text().splitlines()) if logs else 0

    def committed(self) -> dict[str, tuple[int, int]]:
        """(inode, mtime) of everything that counts: parts, manifests, objects of committed shards, drafts."""
        root = self.disk / "store"
        found = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".put-")]
        shards = {path.parent for path in found if path.name == "manifest.parquet"}
        counted = [path for path in found if "hidden" not in path.parts or path.parent in shards]
        return {
            str(path.relative_to(root)): (path.stat().st_ino, path.stat().st_mtime_ns)
            for path in counted
            if path.name not in ("current.json", "round.yaml")
        }

    def start(self, api: str, **environment: str) -> "subprocess.Popen[bytes]":
        """The round in a process of its own; each completion takes a moment."""
        round_file = self.folder / "round.json"
        round_file.write_text(json.dumps(self.fields))
        env = {
            **os.environ,
            **self.environment,
            "PREFECT_API_URL": api,
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests"))),
            "STANDIN_DELAY": "0.2",
            **environment,
        }
        with (self.folder / "flow.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "standin.child", str(round_file)],
                cwd=self.folder, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip


def machine_on(tmp_path: Path, disk: Path, **budget: float) -> SmallMachine:
    made = new_machine(tmp_path / "machine")
    training = {**made.fields["train"], "max_steps": None, "epochs": 2}
    extraction = {**made.fields["extract"], "shard_bytes": 1 << 17, "object_bytes": 1 << 16}
    fields: dict[str, Any] = {**made.fields, "budget": budget, "train": training, "extract": extraction}
    return SmallMachine(made.folder, fields, disk)


def moments(machine: SmallMachine) -> dict[str, Callable[[], bool]]:
    """When each step is in the middle of its work."""
    return {
        "generate": lambda: machine.requests("complete").total() >= 5,
        "extract": lambda: any("manifest.parquet" in path for path in machine.committed()),
        "train": lambda: machine.trained() >= 2,
    }


def until(condition: Callable[[], bool], what: str, run: "subprocess.Popen[bytes]") -> None:
    """Wait while the round runs."""
    wait_for(condition, what, LIMIT, lambda: run.poll() is None)


def use(machine: SmallMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_vllm(monkeypatch)
    machine.enter(monkeypatch)


def whole(machine: SmallMachine) -> list[str]:
    """Check that the round is complete and its states verify; its report's notes."""
    context = machine.round()
    assert look(context).done == ALL_STEPS
    assert faulty_shards(context, deep=True) == {}
    answers = read_answers(context.store, context.prefix("answers"))
    assert len(answers) == SAMPLES
    assert len(machine.requests("extract")) == SAMPLES
    assert not [path for path in machine.disk.rglob("*") if path.name.startswith(".put-") or ".partial" in path.name]
    report = stored_report(context)
    assert report is not None
    return list(report.notes)


@pytest.mark.parametrize(
    "blind",
    [pytest.param(False, id="seen-before"), pytest.param(True, id="found-by-the-write", marks=pytest.mark.long)],
)
def test_a_round_pauses_in_every_step_and_goes_on_by_itself(
    blind: bool, api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        machine = machine_on(tmp_path, disk, free_bytes=0 if blind else LOW_WATER, pause_seconds=600)
        run = machine.start(api, **({"STANDIN_BLIND_GUARD": "1"} if blind else {}))
        try:
            for step, moment in moments(machine).items():
                if blind and step == "train":
                    break  # the trainer looks for itself: test_full_disk_training.py
                until(moment, f"{step} is in the middle of its work", run)
                kept, paused = machine.committed(), more(machine.pauses, 1)
                ballast = fill(disk, leave=0 if blind else LOW_WATER // 2)
                until(paused, f"{step} pauses", run)
                assert kept.items() <= machine.committed().items(), "nothing that counts was touched"
                resumed = more(machine.resumptions, 1)
                ballast.unlink()
                until(resumed, f"{step} goes on", run)
                assert kept.items() <= machine.committed().items()
            assert run.wait(LIMIT) == 0, machine.log[-3000:]
        finally:
            run.kill()
            run.wait()
        wait_for(lambda: living(machine.folder / "state") == [], "no process is left", LIMIT)
        use(machine, monkeypatch)
        notes = whole(machine)
        assert sum(bool(RESUMED.match(note)) for note in notes) >= (2 if blind else 3)
        assert max(machine.requests("extract").values()) <= (3 if blind else 1), "no storm of retries"


def test_without_room_a_round_stops_with_a_sentence_and_a_later_one_goes_on(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        machine = machine_on(tmp_path, disk, free_bytes=LOW_WATER, pause_seconds=1)
        run = machine.start(api)
        try:
            until(moments(machine)["extract"], "a shard is committed", run)
            ballast = fill(disk, leave=LOW_WATER // 2)
            assert run.wait(LIMIT) == 1
        finally:
            run.kill()
            run.wait()
        wait_for(lambda: living(machine.folder / "state") == [], "no process is left", LIMIT)
        assert re.search(r"disk gate: no room before shard \d+ within 1 s: .* free on .* needs", machine.log)
        assert "make room and start the round again, it goes on where it stopped" in machine.log
        assert "attempt 2" not in machine.log, "a stop for want of disk is not retried"

        kept = machine.committed()
        ballast.unlink()
        again = machine.start(api)
        assert again.wait(LIMIT) == 0, machine.log[-3000:]
        assert kept.items() <= machine.committed().items()
        use(machine, monkeypatch)
        whole(machine)
        assert machine.launches()["plain"] == 2, "one for the answers, one for the evaluation: none was asked again"
