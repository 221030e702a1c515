"""Answers are kept once each, survive torn writes, and are finished only when the parts hold them."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import DiskFull, StoreError
from infra.store.answers import Answer, AnswerLog, read_answers
from infra.store.journal import Journal
from infra.store.objects import ObjectStore

PREFIX = "rounds/r/answers/k"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path / 'store'}")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "scratch" / "answers.jsonl"


def answer(number: int) -> Answer:
    messages = [{"role": "user", "content": f"line\nbreak {number} \u2028"}]
    return Answer(f"id-{number}", messages, [1, 2], [number], "stop", "vllm 1", {"temperature": 0.5}, "ok", 0)


ANSWERS = {f"id-{number}": answer(number) for number in range(6)}


def test_only_what_is_wanted_is_read(store: ObjectStore, journal: Path) -> None:
    with AnswerLog(store, PREFIX, journal) as log:
        for number in range(6):
            log.add(answer(number))
            if number in (1, 3):
                log.commit()
        log.add(replace(answer(9), finish_reason="length"))
        wanted = ["id-4", "id-1", "id-7"]
        assert log.done(wanted) == {name: ANSWERS[name] for name in wanted[:2]}
        assert log.done([]) == {}
        assert log.finish_reasons() == {"stop": 6, "length": 1}
    assert read_answers(store, PREFIX, ["id-3", "id-4"]) == {"id-3": ANSWERS["id-3"]}


def test_answers_survive_without_a_commit(store: ObjectStore, journal: Path) -> None:
    with AnswerLog(store, PREFIX, journal) as log:
        for item in ANSWERS.values():
            assert log.add(item)
    with AnswerLog(store, PREFIX, journal) as log:
        assert log.done() == ANSWERS
        assert "id-3" in log
        assert "id-9" not in log
        assert len(log) == 6
    assert store.list() == []


def test_commit_moves_answers_from_journal_to_store(store: ObjectStore, journal: Path) -> None:
    with AnswerLog(store, PREFIX, journal) as log:
        for number in range(4):
            log.add(answer(number))
        assert log.commit() == 4
        assert log.commit() == 0
        assert journal.read_bytes() == b""
        log.add(answer(4))
        log.add(answer(5))
        assert log.commit() == 2
        assert log.done() == ANSWERS
    assert read_answers(store, PREFIX) == ANSWERS
    assert len(store.list(PREFIX)) == 2


def test_a_journal_whose_end_does_not_reach_the_disk_is_let_go(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def over_quota(_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    descriptors = len(os.listdir("/proc/self/fd"))
    mine = Journal(journal)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", over_quota)
        with pytest.raises(DiskFull, match=r"answers\.jsonl could not be closed: Disk quota exceeded"):
            mine.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with Journal(journal) as again:
        assert again.entries == []


def test_the_first_answer_wins(store: ObjectStore, journal: Path) -> None:
    second = replace(answer(0), answer_ids=[99])
    with AnswerLog(store, PREFIX, journal) as log:
        assert log.add(answer(0))
        assert not log.add(second)
        log.commit()
        assert not log.add(second)
        assert log.done() == {"id-0": answer(0)}


def test_a_kill_between_part_and_clearing_counts_nothing_twice(store: ObjectStore, journal: Path) -> None:
    with AnswerLog(store, PREFIX, journal) as log:
        log.add(answer(0))
        lines = journal.read_bytes()
        log.commit()
    journal.write_bytes(lines)
    with AnswerLog(store, PREFIX, journal) as log:
        assert log.done() == {"id-0": answer(0)}
        assert log.commit() == 0
        assert len(store.list(PREFIX)) == 1
        assert journal.read_bytes() == b""


@pytest.mark.parametrize("torn", [b'{"sample_id":"id-9","mess', b"\0" * 100, b"\xff\xfe\n", b"7\n"])
def test_torn_lines_are_cut(store: ObjectStore, journal: Path, torn: bytes) -> None:
    with AnswerLog(store, PREFIX, journal) as log:
        log.add(answer(0))
    with journal.open("ab") as stream:
        stream.write(torn)
    with AnswerLog(store, PREFIX, journal) as log:
        assert set(log.done()) == {"id-0"}
        assert torn not in journal.read_bytes()
        log.add(answer(1))
    with AnswerLog(store, PREFIX, journal) as log:
        assert set(log.done()) == {"id-0", "id-1"}


def test_a_cut_of_the_last_line_loses_that_line_only(store: ObjectStore, journal: Path) -> None:
    with AnswerLog(store, PREFIX, journal) as log:
        log.add(answer(0))
        kept = journal.stat().st_size
        log.add(answer(1))
    whole = journal.read_bytes()
    for end in (kept, kept + 1, kept + 2, (kept + len(whole)) // 2, len(whole) - 2, len(whole) - 1):
        journal.write_bytes(whole[:end])
        with AnswerLog(store, PREFIX, journal) as log:
            assert log.done() == {"id-0": answer(0)}


def test_a_second_writer_is_refused(store: ObjectStore, journal: Path) -> None:
    first = AnswerLog(store, PREFIX, journal)
    with pytest.raises(StoreError, match="another process is writing the journal"):
        AnswerLog(store, PREFIX, journal)
    first.close()
    AnswerLog(store, PREFIX, journal).close()


def test_a_write_cut_short_leaves_the_journal_whole(store: ObjectStore, journal: Path) -> None:
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with AnswerLog(store, PREFIX, journal) as log:
        log.add(answer(0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size + 20, before[1]))  # as on a full disk
        try:
            with pytest.raises(StoreError, match="could not be written"):
                log.add(answer(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert "id-1" not in log
        assert log.add(answer(1))
    with AnswerLog(store, PREFIX, journal) as log:
        assert set(log.done()) == {"id-0", "id-1"}


def test_finished_only_when_the_parts_hold_what_was_counted(store: ObjectStore, journal: Path) -> None:
    assert "not finished" in str(AnswerLog.fault(store, PREFIX))
    with AnswerLog(store, PREFIX, journal) as log:
        for number in range(3):
            log.add(answer(number))
        log.commit()
        log.add(answer(3))
        log.finish()
    assert AnswerLog.finished(store, PREFIX)
    assert set(read_answers(store, PREFIX)) == {f"id-{number}" for number in range(4)}
    assert json.loads(store.get(f"{PREFIX}/done.json"))["count"] == 4
    lost = store.list(PREFIX)[-1].path
    store.delete(lost)
    assert "hold 3 answers" in str(AnswerLog.fault(store, PREFIX))
    assert not AnswerLog.finished(store, PREFIX)


def test_a_damaged_part_is_named(store: ObjectStore, journal: Path) -> None:
    with AnswerLog(store, PREFIX, journal) as log:
        log.add(answer(0))
        log.finish()
    path = next(info.path for info in store.list(PREFIX) if "part-" in info.path)
    store.put(path, store.get(path)[:-1])
    assert not AnswerLog.finished(store, PREFIX)
    for attempt in (lambda: AnswerLog(store, PREFIX, journal), lambda: read_answers(store, PREFIX)):
        with pytest.raises(StoreError, match="part-00000"):
            attempt()
    store.delete(path)
    with AnswerLog(store, PREFIX, journal) as log:  # the refused one let go of the journal
        assert log.done() == {}
