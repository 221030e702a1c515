"""Samples as Parquet parts under one manifest, read back only if they are what was written."""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import StoreError
from infra.store.objects import ObjectMissing, ObjectStore

MANIFEST = "manifest.json"
PART_ROWS = 2048
TOKEN_COLUMNS = ("input_ids", "loss_mask")
MOST_SHARED = 1 << 22
"""No vocabulary has as many tokens."""
_FIELDS: dict[str, Any] = {
    "row": pa.int64(),
    "sample_id": pa.string(),
    "messages": pa.string(),
    "input_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.int8()),
    "split": pa.string(),
    "finish_reason": pa.string(),
    "engine": pa.string(),
    "sampling": pa.string(),
}
_SCHEMA = pa.schema(_FIELDS)


@dataclass(frozen=True)
class Sample:
    """Everything up to and including one assistant turn.

    Attributes:
        row: its number in the round; training samples first, held-out ones after.
        sample_id: names it for ever, whatever its row.
        messages: the conversation, the answer last.
        input_ids: token ids.
        loss_mask: 1 where the assistant wrote the token in this turn, else 0; as long as ``input_ids``.
        split: what it is for.
        finish_reason: why the answer ended, as the engine says (``stop``, ``length``).
        engine: engine and version that answered.
        sampling: how it was sampled.
    """

    row: int
    sample_id: str
    messages: list[dict[str, Any]]
    input_ids: list[int]
    loss_mask: list[int]
    split: Literal["train", "heldout"]
    finish_reason: str
    engine: str
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One Parquet file: its name, rows, bytes and SHA-256 (hex)."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SamplesManifest:
    """What a samples folder holds; ``tokens`` counts all tokens, ``train`` and ``heldout`` samples."""

    rows: int
    train: int
    heldout: int
    tokens: int
    parts: tuple[Part, ...]


def write_samples(
    store: ObjectStore, prefix: str, samples: Iterable[Sample], part_rows: int = PART_ROWS
) -> SamplesManifest:
    """Write the samples in row order; they count when the manifest, put last, is there.

    Raises:
        StoreError: rows are not 0, 1, 2 ..., a training sample follows a held-out one, a mask does not fit
            its tokens, an id comes twice, or the store could not be written.
    """
    parts: list[Part] = []
    counts = {"train": 0, "heldout": 0}
    tokens = 0
    for batch in _batches(_checked(samples), part_rows):
        data = _to_parquet(batch)
        part = Part(f"part-{len(parts):05d}.parquet", len(batch), len(data), hashlib.sha256(data).hexdigest())
        store.put(f"{prefix}/{part.name}", data)
        parts.append(part)
        tokens += sum(len(sample.input_ids) for sample in batch)
        for sample in batch:
            counts[sample.split] += 1
    manifest = SamplesManifest(sum(counts.values()), counts["train"], counts["heldout"], tokens, tuple(parts))
    store.put(f"{prefix}/{MANIFEST}", json.dumps(asdict(manifest), indent=1).encode())
    return manifest


def samples_manifest(store: ObjectStore, prefix: str) -> SamplesManifest:
    """The manifest of a samples folder.

    Raises:
        ObjectMissing: the samples were not finished.
        StoreError: it is damaged.
    """
    path = f"{prefix}/{MANIFEST}"
    try:
        raw = json.loads(store.get(path))
        return SamplesManifest(**{**raw, "parts": tuple(Part(**part) for part in raw["parts"])})
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged: {error}", fix="delete it; the samples are prepared again") from error


def samples_fault(store: ObjectStore, prefix: str) -> str | None:
    """Why the samples below ``prefix`` do not count as done, or None when every part verifies."""
    try:
        for part in samples_manifest(store, prefix).parts:
            _read_part(store, prefix, part)
    except ObjectMissing as error:
        return f"samples are not finished: {error}"
    except StoreError as error:
        return str(error)
    return None


def iter_samples(store: ObjectStore, prefix: str) -> Iterator[Sample]:
    """The samples in row order, a part in memory at a time, each part verified before its first sample.

    Raises:
        StoreError: a part is missing, or its bytes are not those that were written.
    """
    row, known = 0, Numbers()
    for part in samples_manifest(store, prefix).parts:
        data = _read_part(store, prefix, part)
        for sample in _from_parquet(data, known):
            if sample.row != row:
                raise StoreError(f"{prefix}/{part.name} has row {sample.row}", expected=f"row {row}")
            row += 1
            yield sample


def read_samples(store: ObjectStore, prefix: str) -> list[Sample]:
    """All samples in row order; raises as :func:`iter_samples` does."""
    return list(iter_samples(store, prefix))


def _read_part(store: ObjectStore, prefix: str, part: Part) -> bytes:
    path = f"{prefix}/{part.name}"
    data = store.get(path)
    if len(data) != part.bytes:
        raise StoreError(f"{path} has {len(data)} bytes", expected=f"{part.bytes} bytes")
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise StoreError(f"{path} is damaged: its bytes do not have the checksum in {MANIFEST}")
    return data


def _checked(samples: Iterable[Sample]) -> Iterator[Sample]:
    seen: set[str] = set()
    heldout_began = False
    for row, sample in enumerate(samples):
        if sample.row != row:
            raise StoreError(f"sample {sample.sample_id} has row {sample.row}", expected=f"row {row}")
        if sample.sample_id in seen:
            raise StoreError(f"sample {sample.sample_id} comes twice, the second time as row {row}")
        if len(sample.loss_mask) != len(sample.input_ids) or not set(sample.loss_mask) <= {0, 1}:
            raise StoreError(
                f"sample {sample.sample_id} has {len(sample.input_ids)} tokens and a mask of {len(sample.loss_mask)}",
                expected="a 0 or 1 for each token",
            )
        if sample.split == "train" and heldout_began:
            raise StoreError(
                f"training sample {sample.sample_id} (row {row}) follows a held-out one",
                expected="all training rows first",
            )
        heldout_began = sample.split == "heldout"
        seen.add(sample.sample_id)
        yield sample


def _batches(samples: Iterator[Sample], size: int) -> Iterator[list[Sample]]:
    while batch := list(islice(samples, size)):
        yield batch


def _to_parquet(samples: list[Sample]) -> bytes:
    lines = [
        {
            **vars(sample),
            "messages": json.dumps(sample.messages),
            "sampling": json.dumps(sample.sampling, sort_keys=True),
        }
        for sample in samples
    ]
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(lines, schema=_SCHEMA), stream)
    return stream.getvalue()


def _from_parquet(data: bytes, known: "Numbers") -> Iterator[Sample]:
    for batch in pq.ParquetFile(io.BytesIO(data)).iter_batches(batch_size=256):
        lists = zip(*(known.lists(batch.column(name)) for name in TOKEN_COLUMNS), strict=True)
        for line, (input_ids, mask) in zip(batch.drop_columns(list(TOKEN_COLUMNS)).to_pylist(), lists, strict=True):
            line |= {"messages": json.loads(line["messages"]), "sampling": json.loads(line["sampling"])}
            yield Sample(**line, input_ids=input_ids, loss_mask=mask)


class Numbers:
    """Lists of small numbers, in which equal numbers are one object: a third of the memory where there are millions."""

    def __init__(self) -> None:
        self._objects: npt.NDArray[np.object_] = np.arange(0).astype(object)

    def lists(self, column: Any) -> Iterator[list[int]]:
        """A list of each row of an Arrow column of lists of numbers."""
        offsets, numbers = column.offsets.to_pylist(), column.values.to_numpy()
        if len(numbers) and numbers.min() >= 0 and numbers.max() < MOST_SHARED:
            if numbers.max() >= len(self._objects):
                self._objects = np.arange(int(numbers.max()) + 1).astype(object)
            numbers = self._objects[numbers]
        for start, end in pairwise(offsets):
            yield numbers[start:end].tolist()
