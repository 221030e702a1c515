"""A disk that is really full: nothing of a write is left, nothing that was there is harmed, and writers go on later."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from standin.small_disk import fill, small_disk

from infra.errors import DiskFull
from infra.store.answers import Answer, AnswerLog, read_answers
from infra.store.hidden import StatesMeta, plan_shards, verify_shard
from infra.store.journal import Journal
from infra.store.objects import ObjectStore
from infra.store.writer import ShardWriter

SIZE = 4 << 20
PREFIX = "rounds/r/hidden/k"
META = StatesMeta(
    taps=(1, 2), final="pre_norm", dtype="bf16", hidden_size=64, engine="e", engine_version="1", target_revision="t"
)


def answer(number: int, tokens: int = 200) -> Answer:
    return Answer(f"s{number:04d}#0", [], [1] * tokens, [2] * tokens, "stop", "e 1", {}, "ok", 0)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_put_leaves_the_old_object_and_nothing_else(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        store = ObjectStore(f"file://{disk}")
        store.put("a/x", b"old")
        fill(disk, leave=1 << 16)
        with pytest.raises(DiskFull, match="could not write a/x below .*: No space left on device"):
            store.put("a/x", bytes(1 << 20))
        assert store.get("a/x") == b"old"
        assert names(disk) == {"a/x", "ballast"}


def test_a_put_is_done_again_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        store, asked = ObjectStore(f"file://{disk}"), []
        ballast = fill(disk, leave=1 << 16)

        def make_room(error: DiskFull) -> None:
            asked.append(str(error))
            if len(asked) == 2:
                ballast.unlink()

        store.on_full = make_room
        assert store.put("a/x", bytes(1 << 20), if_absent=True)
        assert len(asked) == 2
        assert names(disk) == {"a/x"}
        assert pickle.loads(pickle.dumps(store)).on_full is None, "another process has its own"


def test_a_journal_keeps_its_entries_whole(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        path, kept = disk / "journal.jsonl", 0
        with Journal(path) as journal:
            journal.append({"number": kept})
            ballast = fill(disk)
            # The file's last page takes some more; then an entry is cut in the middle.
            while _tried(partial(journal.append, {"number": kept + 1})):
                kept += 1
            assert kept > 10
            ballast.unlink()
            journal.append({"number": kept + 1})
        held = path.read_bytes()
        with Journal(path) as again:
            assert path.read_bytes() == held
            assert [entry["number"] for entry in again.entries] == list(range(kept + 2))


def test_answers_are_committed_once_when_the_disk_fills_at_every_step(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        store, journal = ObjectStore(f"file://{disk}/store"), disk / "scratch" / "journal.jsonl"
        added = 0
        with AnswerLog(store, "answers", journal) as log:
            for number in range(64):
                ballast = fill(disk, leave=4096) if number % 16 == 8 else None
                try:
                    while not _tried(partial(log.add, answer(number))):
                        assert ballast is not None
                        ballast.unlink()
                    if number % 16 == 15:
                        ballast = fill(disk)
                        with pytest.raises(DiskFull):
                            log.commit()
                        ballast.unlink()
                        assert log.commit() == 16
                finally:
                    (disk / "ballast").unlink(missing_ok=True)
                added += 1
            log.finish()
        assert added == 64
        assert AnswerLog.finished(store, "answers")
        assert set(read_answers(store, "answers")) == {f"s{number:04d}#0" for number in range(64)}


def _tried(work: Callable[[], object]) -> bool:
    try:
        work()
    except DiskFull:
        return False
    return True


def test_a_shard_waits_at_each_object_and_verifies(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        store = ObjectStore(f"file://{disk}")
        torch.manual_seed(0)
        rows = [list(range(row, row + 100)) for row in range(12)]
        [plan] = plan_shards([len(row) for row in rows], 3 * 64 * 2, 1 << 30)
        waited = 0

        def make_room(_error: DiskFull) -> None:
            nonlocal waited
            waited += 1
            (disk / "ballast").unlink()

        store.on_full = make_room
        writer = ShardWriter(store, PREFIX, plan, META, object_bytes=100 * 3 * 64 * 2 * 3)
        for row, ids in enumerate(rows):
            fill(disk, leave=8192)
            writer.add(row, ids, torch.randn(100, 3, 64).to(torch.bfloat16))
        fill(disk)
        writer.commit()
        assert waited == 5, "before each of the four objects, and before the manifest"
        assert verify_shard(store, PREFIX, plan, META, dict(enumerate(rows)), deep=True) is None
        assert not [name for name in names(disk) if ".put-" in name]
