"""The answers of a round: journalled as they come, committed in parts, keyed by sample id."""

import hashlib
import io
import json
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import StoreError
from infra.store.columns import Columns
from infra.store.journal import Journal
from infra.store.objects import ObjectMissing, ObjectStore

DONE = "done.json"
GIVEN = "given"
"""Engine of answers that the data came with."""
Status = Literal["ok", "empty", "refused", "dropped"]
_FIELDS: dict[str, Any] = {
    "sample_id": pa.string(),
    "messages": pa.string(),
    "prompt_ids": pa.list_(pa.int32()),
    "answer_ids": pa.list_(pa.int32()),
    "finish_reason": pa.string(),
    "engine": pa.string(),
    "sampling": pa.string(),
    "status": pa.string(),
    "turn": pa.int32(),
}
_SCHEMA = pa.schema(_FIELDS)


@dataclass(frozen=True)
class Answer:
    """What became of one prompt (one assistant turn of it).

    Attributes:
        sample_id: names the sample; an answer is wanted once for each.
        messages: the conversation up to the answer, the answer included when there is one.
        prompt_ids: token ids the engine was given.
        answer_ids: token ids the engine answered with; empty unless ``status`` is ok.
        finish_reason: why the answer ended, as the engine says.
        engine: engine and version, or :data:`GIVEN`.
        sampling: how it was sampled.
        status: what it is good for.
        turn: which assistant turn of the conversation, from 0.
    """

    sample_id: str
    messages: list[dict[str, Any]]
    prompt_ids: list[int]
    answer_ids: list[int]
    finish_reason: str
    engine: str
    sampling: dict[str, Any]
    status: Status
    turn: int


class AnswerLog:
    """Answers below one prefix of the store; the first answer for a sample wins, later ones are ignored.

    Safe to use from several threads. One process at a time: a second one is refused.

    Args:
        prefix: the step's folder in the store.
        journal: file on a local disk for answers not committed yet.

    Raises:
        StoreError: another process has the journal, or a committed part is damaged.
    """

    def __init__(self, store: ObjectStore, prefix: str, journal: Path) -> None:
        self._store, self._prefix = store, prefix
        self._guard = threading.Lock()
        self._journal = Journal(journal)
        try:
            self._parts = len(_part_paths(store, prefix))
            self._committed = _finish_reasons(store, prefix)
            self._pending: dict[str, Answer] = {}
            for entry in self._journal.entries:
                self._take(Answer(**entry))
            if self._journal.entries and not self._pending:
                self._journal.clear()  # the last run ended between its part and the clearing
        except TypeError as error:
            self._journal.close()
            raise StoreError(f"the journal {journal} holds something else than answers: {error}") from error
        except BaseException:
            self._journal.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._committed) + len(self._pending)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._committed or sample_id in self._pending

    def done(self, wanted: Collection[str] | None = None) -> dict[str, Answer]:
        """The answers so far by sample id, committed or not.

        Args:
            wanted: ids of those to be read; None: all.

        Raises:
            StoreError: a committed part is damaged.
        """
        with self._guard:
            committed = self._committed if wanted is None else [name for name in wanted if name in self._committed]
            found = read_answers(self._store, self._prefix, committed) if committed else {}
            pending = self._pending if wanted is None else [name for name in wanted if name in self._pending]
            return {**found, **{name: self._pending[name] for name in pending}}

    def finish_reasons(self) -> Counter[str]:
        """How many answers there are so far, by why they ended."""
        pending = (answer.finish_reason for answer in self._pending.values())
        return Counter([*self._committed.values(), *pending])

    def add(self, answer: Answer) -> bool:
        """Keep an answer; it survives a kill from here on. False: that sample has one already.

        Raises:
            StoreError: the journal could not be written.
        """
        with self._guard:
            if answer.sample_id in self:
                return False
            self._journal.append(vars(answer))
            return self._take(answer)

    def commit(self) -> int:
        """Move the journalled answers into a part in the store. Returns how many; killed anywhere, nothing is lost."""
        with self._guard:
            answers = sorted(self._pending.values(), key=lambda answer: answer.sample_id)
            if answers:
                data = _to_parquet(answers)
                self._store.put(f"{self._prefix}/part-{self._parts:05d}-{_short_hash(data)}.parquet", data)
                self._parts += 1
                self._committed.update((name, answer.finish_reason) for name, answer in self._pending.items())
                self._pending.clear()
                self._journal.clear()
            return len(answers)

    def finish(self) -> None:
        """Commit, then say in the store that these are all: how many, and the hash of their ids."""
        self.commit()
        with self._guard:
            text = json.dumps(_summary(self._committed), indent=1)
            self._store.put(f"{self._prefix}/{DONE}", text.encode())

    def close(self) -> None:
        """Let another process have the journal; what is not committed stays in it."""
        self._journal.close()

    @staticmethod
    def fault(store: ObjectStore, prefix: str) -> str | None:
        """Why the answers below ``prefix`` do not count as complete; None when the parts hold what was finished."""
        path = f"{prefix}/{DONE}"
        try:
            summary = json.loads(store.get(path))
            ids = _finish_reasons(store, prefix)
        except ObjectMissing:
            return f"answers are not finished: there is no {path}"
        except (StoreError, ValueError) as error:
            return f"answers below {prefix} are damaged: {error}"
        if summary != _summary(ids):
            return f"the parts below {prefix} hold {len(ids)} answers, not those that {path} counts"
        return None

    @staticmethod
    def finished(store: ObjectStore, prefix: str) -> bool:
        """Whether :meth:`fault` finds none."""
        return AnswerLog.fault(store, prefix) is None

    def _take(self, answer: Answer) -> bool:
        if answer.sample_id in self:
            return False
        self._pending[answer.sample_id] = answer
        return True


class StoredAnswers(Mapping[str, Answer]):
    """Committed answers by sample id, as Arrow columns in memory; an Answer is made when it is asked for.

    Args:
        parts: of the store, in order; the first answer for a sample wins.
        wanted: ids of those to be kept; None: all.
    """

    def __init__(self, parts: Iterator[Columns], wanted: Collection[str] | None = None) -> None:
        kept = None if wanted is None else set(wanted)
        self._places: dict[str, tuple[Columns, int]] = {}
        for part in parts:
            for row, name in enumerate(part.column("sample_id")):
                if kept is None or name in kept:
                    self._places.setdefault(name, (part, row))

    def __getitem__(self, sample_id: str) -> Answer:
        part, row = self._places[sample_id]
        line = part.row(row)
        return Answer(**{**line, "messages": json.loads(line["messages"]), "sampling": json.loads(line["sampling"])})

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_answers(store: ObjectStore, prefix: str, wanted: Collection[str] | None = None) -> StoredAnswers:
    """The committed answers by sample id, all or those ``wanted``; needs no journal.

    Raises:
        StoreError: a part is damaged.
    """
    return StoredAnswers(_parts(store, prefix), wanted)


def _summary(ids: Collection[str]) -> dict[str, Any]:
    return {"count": len(ids), "ids_sha256": hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()}


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _part_paths(store: ObjectStore, prefix: str) -> list[str]:
    return [info.path for info in store.list(prefix) if info.path.startswith(f"{prefix}/part-")]


def _read_part(store: ObjectStore, path: str) -> io.BytesIO:
    """A part's bytes; its name carries their hash, so damage shows."""
    data = store.get(path)
    if not path.endswith(f"-{_short_hash(data)}.parquet"):
        raise StoreError(
            f"{path} is damaged: its bytes do not have the hash in its name",
            fix="delete it; its answers are generated again",
        )
    return io.BytesIO(data)


def _parts(store: ObjectStore, prefix: str, columns: list[str] | None = None) -> Iterator[Columns]:
    for path in _part_paths(store, prefix):
        yield Columns(pq.read_table(_read_part(store, path), columns=columns))


def _finish_reasons(store: ObjectStore, prefix: str) -> dict[str, str]:
    """Why the committed answers ended, by sample id."""
    found: dict[str, str] = {}
    for part in _parts(store, prefix, ["sample_id", "finish_reason"]):
        for name, reason in zip(part.column("sample_id"), part.column("finish_reason"), strict=True):
            found.setdefault(name, sys.intern(reason))
    return found


def _to_parquet(answers: list[Answer]) -> bytes:
    lines = [
        {**vars(answer), "messages": json.dumps(answer.messages), "sampling": json.dumps(answer.sampling)}
        for answer in answers
    ]
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(lines, schema=_SCHEMA), stream)
    return stream.getvalue()
