"""Samples come back as they were written, or not at all."""

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import StoreError
from infra.store.objects import ObjectMissing, ObjectStore
from infra.store.samples import Sample, Samples, TokenIds, samples_fault, samples_manifest, write_samples

PREFIX = "rounds/r/samples/k"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}")


def sample(row: int, split: str = "train") -> Sample:
    messages = [{"role": "user", "content": f"Grüße {row} \ud83d"}, {"role": "assistant", "content": "ok"}]
    ids = list(range(row, row + 5 + row % 3))
    mask = [0, 0] + [1] * (len(ids) - 2)
    return Sample(row, f"id-{row}", messages, ids, mask, split, "stop", "vllm 1", {"seed": row})  # type: ignore[arg-type]


SAMPLES = [sample(row, "train" if row < 7 else "heldout") for row in range(10)]


def test_round_trip_in_parts(store: ObjectStore) -> None:
    written = write_samples(store, PREFIX, iter(SAMPLES), part_rows=4)
    assert Samples(store, PREFIX) == SAMPLES
    assert written == samples_manifest(store, PREFIX)
    assert (written.rows, written.train, written.heldout) == (10, 7, 3)
    assert written.tokens == sum(len(item.input_ids) for item in SAMPLES)
    assert [part.rows for part in written.parts] == [4, 4, 2]
    assert samples_fault(store, PREFIX) is None


def test_rows_are_read_as_they_are_asked_for(store: ObjectStore) -> None:
    write_samples(store, PREFIX, SAMPLES, part_rows=4)
    found = Samples(store, PREFIX)
    assert [found[row] for row in (9, 0, 5, -1)] == [SAMPLES[row] for row in (9, 0, 5, -1)]
    assert found[3:8] == SAMPLES[3:8]
    assert found.token_counts.tolist() == [len(item.input_ids) for item in SAMPLES]
    assert (found.tokens, found.supervised) == (sum(map(len, TokenIds(found).values())), found.tokens - 20)
    assert dict(TokenIds(found)) == {item.row: item.input_ids for item in SAMPLES}
    assert TokenIds(found).get(10) is None
    with pytest.raises(IndexError):
        found[10]


def test_a_part_with_other_rows_is_named(store: ObjectStore) -> None:
    write_samples(store, PREFIX, SAMPLES, part_rows=4)
    path = f"{PREFIX}/manifest.json"
    manifest = json.loads(store.get(path))
    store.put(path, json.dumps(manifest | {"parts": manifest["parts"][1:]}).encode())
    with pytest.raises(StoreError, match="part-00001.parquet has rows 4 to 7"):
        Samples(store, PREFIX)


def test_writing_again_gives_the_same_objects(store: ObjectStore) -> None:
    first = write_samples(store, PREFIX, SAMPLES)
    assert write_samples(store, PREFIX, SAMPLES) == first


def test_unfinished_samples_do_not_count(store: ObjectStore) -> None:
    def broken() -> Iterator[Sample]:
        yield from SAMPLES[:5]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_samples(store, PREFIX, broken(), part_rows=2)
    assert store.list(PREFIX)
    with pytest.raises(ObjectMissing):
        Samples(store, PREFIX)
    assert "not finished" in str(samples_fault(store, PREFIX))


@pytest.mark.parametrize(
    ("samples", "fault"),
    [
        ([sample(1)], "has row 1"),
        ([sample(0), replace(sample(1), sample_id="id-0")], "comes twice"),
        ([replace(sample(0), loss_mask=[1])], "mask of 1"),
        ([replace(sample(0), loss_mask=[2] * 5)], "mask"),
        ([sample(0, "heldout"), sample(1, "train")], "follows a held-out one"),
    ],
)
def test_wrong_samples_are_refused(store: ObjectStore, samples: list[Sample], fault: str) -> None:
    with pytest.raises(StoreError, match=fault):
        write_samples(store, PREFIX, samples)
    assert samples_fault(store, PREFIX) is not None


def test_damage_is_named_before_a_sample_of_the_part_is_given(store: ObjectStore) -> None:
    write_samples(store, PREFIX, SAMPLES, part_rows=4)
    path = f"{PREFIX}/part-00001.parquet"
    whole = store.get(path)
    for damaged, fault in ((whole[:-1], "bytes"), (whole[:200] + b"\xff\x00" + whole[202:], "checksum")):
        store.put(path, damaged)
        assert "part-00001" in str(samples_fault(store, PREFIX))
        with pytest.raises(StoreError, match=fault):
            Samples(store, PREFIX)
        store.put(path, whole)
        opened = Samples(store, PREFIX)
        store.put(path, damaged)
        given = iter(opened)
        assert [next(given).row for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(StoreError, match=fault):
            next(given)
    store.delete(path)
    with pytest.raises(ObjectMissing, match="part-00001"):
        Samples(store, PREFIX)
    store.put(f"{PREFIX}/manifest.json", b"{}")
    with pytest.raises(StoreError, match=r"manifest.json is damaged"):
        Samples(store, PREFIX)


def test_memory_does_not_grow_with_the_samples(store: ObjectStore) -> None:
    peaks = []
    for rows in (500, 3_000):
        longer = ({"input_ids": list(range(300)), "loss_mask": [0] * 99 + [1] * 201} for _ in range(rows))
        made = (replace(sample(row, "train"), **change) for row, change in enumerate(longer))  # type: ignore[arg-type]
        write_samples(store, f"{PREFIX}{rows}", made, part_rows=100)
        tracemalloc.start()
        assert sum(len(item.input_ids) for item in Samples(store, f"{PREFIX}{rows}")) == 300 * rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    held = (3_000 - 500) * 2 * 300 * 8  # what lists of the further samples' numbers would take at least, bytes
    assert peaks[1] - peaks[0] < 0.02 * held
