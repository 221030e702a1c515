"""kill -9 of the flow's process, again and again: the next run goes on, and the result is as if nothing had been."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
from standin.engine import StandInEngine
from standin.machine import REPOSITORY, Machine, new_machine, prefect_server

from infra.engines import vllm
from infra.machine.processes import recorded
from infra.steps.extract import shards_of
from infra.steps.ledger import done_steps, report_if_done
from infra.store.answers import read_answers
from infra.store.manifest import MANIFEST, Manifest

LIMIT = 300.0
SAMPLES = 24
POLL_SECONDS = 0.01
STATES = ("samples", "hidden")


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    yield from prefect_server()


def wait_for(condition: Callable[[], bool], what: str, running: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert running is None or running.poll() is None, f"the run ended before: {what}"
        assert time.monotonic() < deadline, f"not within {LIMIT:.0f} s: {what}"
        time.sleep(POLL_SECONDS)


def start(machine: Machine, api: str) -> subprocess.Popen[bytes]:
    """The round in a process of its own; each completion takes a moment, so that a kill can fall between two."""
    round_file = machine.folder / "round.json"
    round_file.write_text(json.dumps(machine.fields))
    environment = {
        **os.environ,
        **machine.environment,
        "PREFECT_API_URL": api,
        "PREFECT_HOME": str(machine.folder / "prefect"),
        "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests"))),
        "STANDIN_DELAY": "0.1",
    }
    with (machine.folder / "flow.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "standin.child", str(round_file)],
            cwd=machine.folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        )  # fmt: skip


def living(machine: Machine) -> list[int]:
    """Processes of this machine, whoever their parent is: its state folder is in their environment."""
    marker, found = f"EAGLE3_STATE_DIR={machine.folder / 'state'}".encode(), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and marker in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def kill_when(machine: Machine, api: str, moment: Callable[[], bool], what: str) -> None:
    """Start a run, kill its process at the moment, and see everything that it started go."""
    run = start(machine, api)
    try:
        wait_for(moment, what, run)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    wait_for(lambda: living(machine) == [], f"no process is left, killed when {what}")


def steps_made(machine: Machine) -> int:
    """Training steps of the last attempt, by the trainer's own log."""
    logs = list(machine.folder.glob("state/scratch/small/train-*/events.jsonl"))
    return sum('"train"' in line for line in logs[0].read_text().splitlines()) if logs else 0


def more(count: Callable[[], int], by: int) -> Callable[[], bool]:
    """True once ``count`` has grown by ``by``."""
    first = count()
    return lambda: count() >= first + by


def test_a_round_killed_everywhere_ends_as_if_it_had_not_been(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(20_26)
    machine, calm = new_machine(tmp_path / "killed"), new_machine(tmp_path / "calm")
    kept: dict[str, tuple[int, int]] = {}

    def answers() -> int:
        return machine.requests("complete").total()

    def extractions() -> int:
        return machine.requests("extract").total()

    def killed(count: Callable[[], int], by: int, what: str) -> None:
        kill_when(machine, api, more(count, by), f"{what} + {by}")
        manifests = {path: made for path, made in machine.written(*STATES).items() if "manifest" in path}
        assert kept.items() <= manifests.items(), "a finished shard is never written again"
        kept.update(manifests)

    generate_kills, extract_kills = 2, 2
    for _ in range(generate_kills):
        killed(answers, chance.randrange(2, 9), "answers")
    for _ in range(extract_kills):
        killed(extractions, chance.randrange(4, 12), "extractions")
    killed(lambda: steps_made(machine), chance.randrange(1, 8), "training steps")
    killed(lambda: machine.launches()["bench"], 1, "servers with the draft")
    draft = machine.written("draft")
    assert draft, "the draft was stored before the evaluation that was killed"

    last = start(machine, api)
    assert last.wait(LIMIT) == 0, (machine.folder / "flow.log").read_text()[-3000:]
    wait_for(lambda: living(machine) == [], "no process is left at the end")
    kill_when(calm, api, lambda: "hidden/current.json" in _pointers(calm), "the calm run has its states")

    monkeypatch.setattr(vllm, "ENGINE", StandInEngine())
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    mine = machine.round()
    report = report_if_done(mine)
    assert done_steps(mine) == {"answers", "samples", "hidden", "draft", "eval", "published", "report"}
    assert report is not None
    assert report.training.steps == 8
    assert machine.written("draft").items() >= draft.items()
    assert recorded(mine.settings.run_dir) == []
    assert not mine.settings.scratch_dir.exists() or list(mine.settings.scratch_dir.iterdir()) == []

    monkeypatch.setenv("EAGLE3_STATE_DIR", calm.environment["EAGLE3_STATE_DIR"])
    others = calm.round()
    assert others.keys == mine.keys
    assert _answers(machine, monkeypatch) == _answers(calm, monkeypatch)
    assert _bytes_of(machine, *STATES) == _bytes_of(calm, *STATES)

    # In flight at a kill: as many answers as there are requests at once; and a shard with what is asked for ahead.
    config = mine.config
    assert _asked_before_extraction(machine) <= SAMPLES + generate_kills * config.generate.concurrency
    largest = max(plan.end_row - plan.first_row for plan in shards_of(others))
    assert extractions() <= SAMPLES + extract_kills * (largest + 3 * config.extract.concurrency)
    assert len(machine.requests("extract")) == SAMPLES


def _asked_before_extraction(machine: Machine) -> int:
    generating = takewhile(lambda event: event.get("launch") != "extract", machine.events())
    return sum("request" in event for event in generating)


def _pointers(machine: Machine) -> set[str]:
    root = machine.folder / "state" / "store" / "rounds" / "small"
    return {str(path.relative_to(root)) for path in root.glob("*/current.json")}


def _answers(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[list[int], list[int], str]]:
    monkeypatch.setenv("EAGLE3_STATE_DIR", machine.environment["EAGLE3_STATE_DIR"])
    round_ = machine.round()
    found = read_answers(round_.store, round_.prefix("answers"))
    return {name: (answer.prompt_ids, answer.answer_ids, answer.finish_reason) for name, answer in found.items()}


def _bytes_of(machine: Machine, *steps: str) -> dict[str, bytes]:
    """Every object of these steps' generations; not the pointers, nor what a dead writer left to be swept.

    A manifest says when it was made, which is all that may differ.
    """
    root = machine.folder / "state" / "store" / "rounds" / "small"
    found = [path for step in steps for path in (root / step).glob("*/**/*") if path.is_file() and path.name[0] != "."]
    return {str(path.relative_to(root)): _timeless(path) for path in found}


def _timeless(path: Path) -> bytes:
    data = path.read_bytes()
    if path.name != MANIFEST:
        return data
    return replace(Manifest.from_bytes(data, str(path)), created="").to_bytes()
