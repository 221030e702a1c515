"""The disk guard on a real small disk: it pauses, frees in the policy's order, goes on by itself, or stops and says."""

import errno
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from standin.heard import hearing
from standin.small_disk import fill, small_disk
from standin.standing import Standing
from standin.stored_round import finish

from infra.config.round import RetentionConfig as Policy
from infra.disk import guard as disk_guard
from infra.disk.candidates import candidates, clean, free, survey
from infra.disk.item import Item
from infra.disk.room import Room, room_gate
from infra.errors import DiskFull, GateError
from infra.machine.locks import round_lock
from infra.progress import Progress
from infra.results import TRAINING
from infra.store.objects import ObjectStore

SIZE = 8 << 20
LOW_WATER = 1 << 20
OWN = "rounds/mine/hidden/now"


class Watched:
    """A guard on a small disk, and what it told: its events, and that it waits."""

    def __init__(self, disk: Path, **changes: Any) -> None:
        self.disk = disk
        self.round = Standing(disk, **changes)
        self.guard = self.round.guard()
        self.told: list[tuple[str, str]] = []
        self.on: dict[str, Callable[[], object]] = {}
        self.guard.progress = self._waits

    def hear(self, record: logging.LogRecord) -> None:
        """One line of the guard's log."""
        event = record.__dict__["event"]
        assert event.resource == "round.mine"
        self._hear(event.name.removeprefix("disk."), event.text)

    def _waits(self, progress: Progress) -> None:
        self._hear("waiting", progress.text)

    def _hear(self, kind: str, text: str) -> None:
        self.told.append((kind, text))
        self.on.get(kind, lambda: None)()

    def kinds(self) -> list[str]:
        found = [kind for kind, _ in self.told]
        return [kind for number, kind in enumerate(found) if number == 0 or kind != found[number - 1]]


Watch = Callable[..., Watched]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr(disk_guard, "POLL_SECONDS", 0.01)
    with small_disk(tmp_path / "disk", SIZE) as disk, ExitStack() as heard:

        def make(free_bytes: int = LOW_WATER, pause_seconds: float = 60, **changes: Any) -> Watched:
            bounds = {"free_bytes": free_bytes, "pause_seconds": pause_seconds, **changes.pop("budget", {})}
            watched = Watched(disk, budget=bounds, **changes)
            heard.enter_context(hearing("infra.disk.guard", watched.hear))
            return watched

        yield make


def test_with_room_it_lets_everything_pass(watch: Watch) -> None:
    watched = watch()
    watched.guard.before("shard 0", store=1 << 20, scratch=1 << 20)
    assert watched.guard.through(lambda: "done") == "done"
    assert watched.told == []


def test_needs_on_one_file_system_add_up(watch: Watch) -> None:
    watched = watch(pause_seconds=0)
    watched.guard.before("a", store=4 << 20)
    watched.guard.before("b", scratch=4 << 20)
    with pytest.raises(GateError, match=r"disk gate: no room before both within 0 s: 8\.4 MB free on .*/disk \(store"):
        watched.guard.before("both", store=4 << 20, scratch=4 << 20)


def test_it_goes_on_by_itself_when_another_frees_room(watch: Watch) -> None:
    watched = watch()
    ballast = fill(watched.disk, leave=1 << 19)
    watched.on["waiting"] = lambda: threading.Thread(target=lambda: ballast.unlink(missing_ok=True)).start()
    watched.guard.before("shard 3", store=1 << 16)

    assert watched.kinds() == ["pause", "waiting", "resume"]
    texts = dict(watched.told)
    assert texts["waiting"].startswith("paused: 524 kB free on ")
    assert texts["waiting"].endswith("needs 1.1 MB")
    assert re.match(r"paused \d+ s before shard 3 for want of disk: 524 kB free", texts["resume"])


def test_it_stops_after_the_bound_and_says_what_could_go(watch: Watch) -> None:
    watched = watch(pause_seconds=2, retention={"states": "keep", "earlier_rounds": False})
    finish(watched.round.store, "other")
    watched.round.store.put("rounds/other/hidden/h1/00000/states", bytes(1 << 20))
    watched.round.store.put(f"{OWN}/00000/states", bytes(1 << 20))
    fill(watched.disk, leave=1 << 19)
    with pytest.raises(GateError) as stopped:
        watched.guard.before("shard 3", store=1 << 16)

    said = str(stopped.value)
    assert "no room before shard 3" in said
    assert "1.0 MB at file://" in said
    assert "rounds/other/hidden/h1 (other: no round file names this round" in said
    assert OWN not in said, "what this round works on is not offered"
    assert watched.kinds() == ["pause", "waiting", "stop"]
    assert watched.round.store.exists("rounds/other/hidden/h1/00000/states")


def test_it_frees_in_order_no_more_than_needed_and_never_what_it_works_on(watch: Watch) -> None:
    watched = watch()
    store, scratch = watched.round.store, watched.round.settings.scratch_dir
    finish(store, "other")
    store.put("rounds/other/hidden/h1/00000/states", bytes(1 << 20))
    store.put(f"{OWN}/00000/states", bytes(1 << 20))
    dead = watched.disk / "store" / "rounds" / ".put-0123456789abcdef"
    dead.write_bytes(bytes(1 << 18))
    os.utime(dead, (0, 0))
    finished = _training(store, scratch, "mine", "done", whole=True)
    unfinished = _training(store, scratch, "mine", "running", whole=False)
    ballast = fill(watched.disk, leave=LOW_WATER - (1 << 17))

    watched.guard.before("shard 0")
    assert [text.split("(")[-1] for kind, text in watched.told if kind == "freed"] == [
        "half written, and its writer died)"
    ]
    ballast.write_bytes(b"")
    fill(watched.disk, leave=1 << 18)
    watched.guard.before("shard 1", store=1 << 18)

    freed = [text for kind, text in watched.told if kind == "freed"]
    assert [("checkpoints of a finished draft" in text, "rounds/other/hidden/h1" in text) for text in freed[1:]] == [
        (True, False),
        (False, True),
    ]
    assert not finished.exists()
    assert unfinished.exists()
    assert store.exists(f"{OWN}/00000/states")
    assert store.list("rounds/other/samples") != []


def test_what_another_process_works_on_is_left_alone(watch: Watch) -> None:
    watched = watch(pause_seconds=0)
    finish(watched.round.store, "other")
    watched.round.store.put("rounds/other/hidden/h1/00000/states", bytes(1 << 20))
    fill(watched.disk, leave=1 << 19)
    with (
        round_lock(watched.round.settings.run_dir, "other"),
        pytest.raises(GateError, match="nothing of this project's"),
    ):
        watched.guard.before("shard 0")
    assert watched.round.store.exists("rounds/other/hidden/h1/00000/states")
    watched.guard.before("shard 0")
    assert not watched.round.store.exists("rounds/other/hidden/h1/00000/states")


def test_a_write_that_finds_the_disk_full_is_done_again_not_stormed(watch: Watch) -> None:
    watched = watch(free_bytes=0)
    watched.round.store.on_full = watched.guard.wait
    ballast = fill(watched.disk, leave=1 << 16)
    waits: list[int] = []

    def later() -> None:
        waits.append(1)
        if len(waits) == 2:
            ballast.unlink()

    watched.on["pause"] = later
    watched.guard.before("shard 0")
    watched.round.store.put("x", bytes(1 << 20))
    assert watched.round.store.size("x") == 1 << 20
    assert [kind for kind in watched.kinds() if kind != "waiting"] == ["pause", "resume", "pause", "resume"]


def test_a_disk_that_says_it_has_room_and_takes_nothing_ends_within_the_bound(watch: Watch) -> None:
    watched = watch(pause_seconds=2)
    tries: list[int] = []

    def quota() -> None:
        tries.append(1)
        raise DiskFull("Disk quota exceeded")

    with pytest.raises(GateError, match="disk gate: no room before the next write within 2 s: Disk quota exceeded"):
        watched.guard.through(quota)
    assert 1 < len(tries) < 12, "each wait is twice as long as the one before"


def test_hours_of_work_that_end_on_a_full_disk_with_room_are_not_done_for_ever(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watch()
    monkeypatch.setattr(disk_guard, "LONGEST_POLL_SECONDS", 0.0)  # so that each failure is long after the one before
    tries: list[int] = []

    def epoch() -> None:
        tries.append(1)
        raise DiskFull("Disk quota exceeded", place=watched.disk)

    with pytest.raises(GateError, match="in 4 attempts: Disk quota exceeded; by every reading there was room"):
        watched.guard.through(epoch)
    assert len(tries) == disk_guard.MOST_FAILURES + 1


def test_for_a_write_that_says_not_where_no_states_go(watch: Watch) -> None:
    watched = watch()
    store, scratch = watched.round.store, watched.round.settings.scratch_dir
    finish(store, "other")
    leftover = _training(store, scratch, "other", "done", whole=True)
    watched.guard.wait(OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x"))
    assert not leftover.exists()
    assert store.list("rounds/other/hidden/h1") != []
    watched.guard.wait(DiskFull("could not write below the store", place=watched.disk))
    assert store.list("rounds/other/hidden/h1") == []


def test_writes_that_failed_together_are_waited_for_once(watch: Watch) -> None:
    watched = watch(free_bytes=0)
    together = [DiskFull("no room for row 6"), DiskFull("no room for row 7")]
    for error in together:
        watched.guard.wait(error)
    assert [kind for kind in watched.kinds() if kind != "waiting"] == ["pause", "resume"]


def test_other_errors_are_not_waited_for(watch: Watch) -> None:
    watched = watch()
    with pytest.raises(ZeroDivisionError):
        watched.guard.through(lambda: 1 // 0)
    assert watched.told == []


def test_the_budget_of_the_round_counts_too(watch: Watch) -> None:
    watched = watch(pause_seconds=0, budget={"disk_bytes": 3 << 20})
    watched.round.store.put(f"{OWN}/00000/states", bytes(2 << 20))
    watched.guard.before("shard 1", store=1 << 19)
    with pytest.raises(GateError, match=r"holds 2\.6 MB and needs 2\.1 MB more, its budget is 3\.1 MB"):
        watched.guard.before("shard 2", store=2 << 20)


def test_a_clean_up_lists_what_goes_and_why_the_rest_stays(watch: Watch) -> None:
    watched = watch()
    store, settings = watched.round.store, watched.round.settings
    finish(store, "done")
    finish(store, "kept")
    finish(store, "unknown")
    _training(store, settings.scratch_dir, "done", "d9", whole=False)
    (settings.scratch_dir / "done" / "staging").mkdir()
    (settings.scratch_dir / "done" / "staging" / "x.safetensors").write_bytes(bytes(5000))
    policies = {"done": Policy(states="until_published"), "kept": Policy(states="keep")}

    found = survey(store, settings, policies)
    assert [item.path.removeprefix(f"{settings.scratch_dir}/") for item in _going(found)] == [
        "done/staging",
        "rounds/done/hidden/h1",
    ]
    why = {item.path: item.why for item in found if not item.may_go}
    assert why["rounds/kept/hidden/h1"] == "kept: retention.states is keep"
    assert why["rounds/unknown/hidden/h1"].startswith("unknown: no round file names this round")
    assert why["rounds/done/samples"] == "done: hidden states are extracted again from them"
    assert why[str(settings.scratch_dir / "done" / "train-d9")] == "done: a training that goes on from here"
    assert store.list("rounds/done/hidden") != []

    with round_lock(settings.run_dir, "done"):
        assert _going(clean(store, settings, policies)) == []
    assert clean(store, settings, policies) == found
    assert store.list("rounds/done/hidden/h1") == []
    assert store.list("rounds/kept/hidden/h1") != []
    assert not (settings.scratch_dir / "done" / "staging").exists()
    assert (settings.scratch_dir / "done" / "train-d9").exists()


def test_the_plan_gate_judges_each_file_system() -> None:
    shared = Room(mount="/data", folders=("store", "scratch"), needed=8, free=10)
    room_gate("r", [shared], 2)
    with pytest.raises(GateError, match=r"plan gate: round r still needs 8 B of disk on /data \(for store and scr"):
        room_gate("r", [shared, Room(mount="/dev/shm", folders=("scratch",), needed=1, free=100)], 3)
    room_gate("finished", [Room(mount="/", folders=("store",), needed=0, free=1)], 1 << 30)


def _going(items: list[Item]) -> list[Item]:
    return [item for item in items if item.may_go]


def _training(store: ObjectStore, scratch: Path, name: str, key: str, whole: bool) -> Path:
    """Checkpoints in scratch, and in the store the whole draft or only a part of it."""
    folder = scratch / name / f"train-{key}" / "checkpoints" / "0"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(1 << 18))
    store.put(f"rounds/{name}/draft/{key}/model.safetensors", b"w")
    if whole:
        store.put(f"rounds/{name}/draft/{key}/{TRAINING}", json.dumps({"files": {"model.safetensors": ""}}).encode())
    return scratch / name / f"train-{key}"


def test_a_round_that_is_begun_during_a_clean_up_is_left_alone(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch()
    store, settings = watched.round.store, watched.round.settings
    folders = store.folders
    with ExitStack() as running:

        def begin(prefix: str) -> list[str]:
            """As the rounds are listed for the first time, one begins that is not among them yet."""
            found = folders(prefix)
            if not store.list("rounds/new"):
                running.enter_context(round_lock(settings.run_dir, "new"))
                finish(store, "new")
            return found

        monkeypatch.setattr(store, "folders", begin)
        assert _going(clean(store, settings, {"new": Policy(states="until_published")})) == []
        assert store.list("rounds/new/hidden/h1") != []
    assert len(_going(clean(store, settings, {"new": Policy(states="until_published")}))) == 1


def test_a_round_that_is_begun_meanwhile_keeps_what_another_would_free(watch: Watch) -> None:
    watched = watch()
    store, settings = watched.round.store, watched.round.settings
    finish(store, "other")
    offered = list(candidates(store, settings, "mine", watched.round.config.retention, OWN))
    assert [item.path for item in offered] == ["rounds/other/hidden/h1"]
    with round_lock(settings.run_dir, "other"):
        assert free(store, settings, "mine", offered[0]) is None
        assert store.list("rounds/other/hidden/h1") != []
    assert free(store, settings, "mine", offered[0]) == 1000
    assert store.list("rounds/other/hidden/h1") == []
