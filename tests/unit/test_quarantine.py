"""A sample without states: the manifest says so, readers pass over it, and the trainer's positions stay right."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infra.drafter.dataset import dataset_rows, write_dataset
from infra.drafter.transfer import StatesMismatch, StatesTransfer
from infra.errors import StoreError
from infra.store.hidden import ShardPlan, read_manifest, shard_prefix, verify_shard
from infra.store.manifest import MANIFEST, StatesMeta
from infra.store.objects import ObjectStore
from infra.store.reader import StatesReader, quarantined_rows
from infra.store.samples import Sample
from infra.store.writer import ShardWriter

PREFIX = "rounds/r/hidden/k"
META = StatesMeta((2, 15), "pre_norm", "bf16", 8, "vllm", "0.32.0", "rev")
TOKENS = {row: [row * 7 + place for place in range(3 + row % 5)] for row in range(8)}
PLANS = [ShardPlan(0, 0, 5), ShardPlan(1, 5, 6), ShardPlan(2, 6, 8)]
LEFT_OUT = {2, 5}
KEPT = [row for row in TOKENS if row not in LEFT_OUT]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """Three shards; row 2 of the first is quarantined, and the only row of the second."""
    made = ObjectStore(f"file://{tmp_path / 'store'}")
    for plan in PLANS:
        writer = ShardWriter(made, PREFIX, plan, META, 1 << 20)
        for row in plan.rows:
            if row in LEFT_OUT:
                writer.quarantine(row)
            else:
                writer.add(row, TOKENS[row], torch.full((len(TOKENS[row]), 3, 8), row, dtype=torch.bfloat16))
        assert writer.commit()
    return made


def test_a_shard_verifies_without_its_quarantined_rows_and_names_them(store: ObjectStore) -> None:
    assert [verify_shard(store, PREFIX, plan, META, TOKENS) for plan in PLANS] == [None, None, None]
    assert read_manifest(store, PREFIX, PLANS[0]).quarantined == (2,)
    assert quarantined_rows(store, PREFIX) == [2, 5]
    reader = StatesReader(store.url, PREFIX)
    assert reader.rows == KEPT
    with pytest.raises(StoreError, match="no committed shard .* holds row 2"):
        reader.read(2)


def test_a_row_that_is_merely_missing_does_not_verify(store: ObjectStore) -> None:
    manifest = read_manifest(store, PREFIX, PLANS[0])
    path = f"{shard_prefix(PREFIX, PLANS[0])}/{MANIFEST}"
    store.delete(path)
    store.put(path, replace(manifest, quarantined=()).to_bytes())
    fault = verify_shard(store, PREFIX, PLANS[0], META, TOKENS)
    assert "tells of 4 rows, not of rows 0 to 4 each once" in str(fault)


def test_a_row_is_quarantined_in_its_turn_only(store: ObjectStore) -> None:
    writer = ShardWriter(store, "rounds/r/hidden/other", PLANS[0], META, 1 << 20)
    with pytest.raises(StoreError, match="row 3 came to shard 0"):
        writer.quarantine(3)
    with pytest.raises(StoreError, match="ends at row 0"):
        writer.commit()


def test_the_trainer_finds_each_samples_own_states(store: ObjectStore, tmp_path: Path) -> None:
    samples = [
        Sample(row, f"s{row}", [], TOKENS[row], [1] * len(TOKENS[row]), "train" if row < 6 else "heldout", "", "", {})
        for row in KEPT
    ]
    facts = write_dataset(samples, tmp_path / "dataset", None)
    assert (facts.rows, facts.train_rows) == (6, 4)
    assert dataset_rows(tmp_path / "dataset") == KEPT
    transfer = StatesTransfer(store.url, PREFIX, tmp_path / "dataset")
    for place, row in enumerate(KEPT):
        states = transfer.get_cached(place)
        assert states["token_ids"].tolist() == TOKENS[row]
        assert states["hidden_states"].unique().tolist() == [row]

    shifted = [replace(sample, row=sample.row + 1) for sample in samples[:-1]]
    write_dataset([*shifted, replace(samples[-1], row=9)], tmp_path / "shifted", None)
    with pytest.raises((StatesMismatch, StoreError)):
        StatesTransfer(store.url, PREFIX, tmp_path / "shifted").get_cached(0)
