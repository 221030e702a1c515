"""A shard is done when its manifest verifies, and every kind of damage is named."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from infra.errors import StoreError
from infra.store.hidden import (
    ShardPlan,
    discard_shard,
    plan_shards,
    read_manifest,
    shard_prefix,
    state_bytes_per_token,
    verify_shard,
)
from infra.store.manifest import ObjectSeal, StatesMeta
from infra.store.objects import ObjectStore
from infra.store.packed import read_contents, token_hash
from infra.store.reader import StatesReader
from infra.store.writer import ShardWriter

PREFIX = "rounds/r/hidden/k"
META = StatesMeta((2, 15), "pre_norm", "bf16", 8, "vllm", "0.32.0", "rev")
TOKEN_BYTES = state_bytes_per_token(META.taps, META.hidden_size)
TOKENS = {row: [row * 7 + place for place in range(3 + row % 5)] for row in range(20)}
PLAN = ShardPlan(0, 0, 20)
OBJECT_BYTES = 20 * TOKEN_BYTES


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}")


def states(row: int, seed: int = 0) -> torch.Tensor:
    """[tokens, 3, 8] bf16, the same for the same row and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + row)
    return torch.randn(len(TOKENS[row]), 3, 8, generator=generator).to(torch.bfloat16)


def write(store: ObjectStore, plan: ShardPlan = PLAN, meta: StatesMeta = META, seed: int = 0) -> bool:
    writer = ShardWriter(store, PREFIX, plan, meta, OBJECT_BYTES)
    for row in plan.rows:
        writer.add(row, TOKENS[row], states(row, seed))
    return writer.commit()


def fault(store: ObjectStore, meta: StatesMeta = META, deep: bool = True, **tokens: Any) -> str:
    found = verify_shard(store, PREFIX, tokens.pop("plan", PLAN), meta, tokens.pop("tokens", TOKENS), deep=deep)
    return str(found) if found else ""


def an_object(store: ObjectStore) -> str:
    return next(info.path for info in store.list(PREFIX) if info.path.endswith(".safetensors"))


def test_a_manifest_is_the_same_in_whatever_order_states_come(tmp_path: Path) -> None:
    manifests = []
    for name, order in (("forward", 1), ("backward", -1)):
        store = ObjectStore(f"file://{tmp_path / name}")
        writer = ShardWriter(store, PREFIX, PLAN, META, OBJECT_BYTES)
        rooms = [writer.reserve(row, TOKENS[row]) for row in PLAN.rows]
        for room in rooms[::order]:
            room.fill(states(room.row))
        assert writer.commit()
        manifests.append(replace(read_manifest(store, PREFIX, PLAN), created="").to_bytes())
    assert manifests[0] == manifests[1]


def test_plans_cut_by_bytes() -> None:
    plans = plan_shards([10, 10, 10, 50, 1, 1], bytes_per_token=2, shard_bytes=40)
    assert [(plan.number, plan.first_row, plan.end_row) for plan in plans] == [
        (0, 0, 2),
        (1, 2, 3),
        (2, 3, 4),
        (3, 4, 6),
    ]
    assert plan_shards([], 2, 40) == []
    assert state_bytes_per_token((3, 31, 59), 7168) == 57_344


def test_rows_come_back_bit_for_bit(store: ObjectStore) -> None:
    plans = [ShardPlan(0, 0, 8), ShardPlan(1, 8, 20)]
    assert all(write(store, plan) for plan in plans)
    assert all(verify_shard(store, PREFIX, plan, META, TOKENS) is None for plan in plans)
    reader = StatesReader(store.url, PREFIX)
    assert reader.rows == list(range(20))
    for row in reversed(reader.rows):
        found = reader.read(row)
        assert torch.equal(found["hidden_states"], states(row))
        assert found["hidden_states"].dtype == torch.bfloat16
        assert found["token_ids"].tolist() == TOKENS[row]
        assert found["token_ids"].dtype == torch.int64


def test_objects_are_plain_safetensors_within_their_bound(store: ObjectStore) -> None:
    write(store)
    manifest = read_manifest(store, PREFIX, PLAN)
    assert len(manifest.objects) > 3
    for name, seal in manifest.objects.items():
        tensors = load(store.get(f"{shard_prefix(PREFIX, PLAN)}/{name}"))
        assert set(tensors) == {"hidden_states", "token_ids"}
        assert tensors["hidden_states"].nbytes <= OBJECT_BYTES
        rows = [place.row for place in manifest.rows if place.object == name]
        assert torch.equal(tensors["hidden_states"], torch.cat([states(row) for row in rows]))
        assert tensors["token_ids"].tolist() == [token for row in rows for token in TOKENS[row]]
        assert seal.bytes == store.size(f"{shard_prefix(PREFIX, PLAN)}/{name}")


def test_a_row_above_the_bound_is_an_object_of_its_own(store: ObjectStore) -> None:
    writer = ShardWriter(store, PREFIX, ShardPlan(0, 0, 4), META, TOKEN_BYTES)
    for row in range(4):
        writer.add(row, TOKENS[row], states(row))
    writer.commit()
    assert len(read_manifest(store, PREFIX, PLAN).objects) == 4
    assert torch.equal(StatesReader(store.url, PREFIX).read(3)["hidden_states"], states(3))


def test_nothing_counts_before_the_manifest(store: ObjectStore) -> None:
    writer = ShardWriter(store, PREFIX, PLAN, META, OBJECT_BYTES)
    for row in range(19):
        writer.add(row, TOKENS[row], states(row))
    assert store.list(PREFIX)
    found = verify_shard(store, PREFIX, PLAN, META, TOKENS)
    assert found is not None
    assert found.missing
    assert StatesReader(store.url, PREFIX).rows == []
    with pytest.raises(StoreError, match="ends at row 19"):
        writer.commit()
    assert write(store, seed=1)  # a new try: other bytes, so other names
    assert {info.path.rsplit("/", 1)[-1] for info in store.list(PREFIX)} == {
        "manifest.parquet",
        *read_manifest(store, PREFIX, PLAN).objects,
    }
    assert fault(store) == ""


@pytest.mark.parametrize(
    ("row", "tokens", "hidden", "message"),
    [
        (1, TOKENS[1], states(1), "row 1 came"),
        (0, TOKENS[0][:-1], states(0), "row 0 has states"),
        (0, TOKENS[0], states(0)[:, :2], "row 0 has states"),
        (0, TOKENS[0], states(0).float(), "float32"),
        (0, [], states(0)[:0], "at least one token"),
    ],
)
def test_wrong_rows_are_refused(
    store: ObjectStore, row: int, tokens: list[int], hidden: torch.Tensor, message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        ShardWriter(store, PREFIX, PLAN, META, OBJECT_BYTES).add(row, tokens, hidden)


def test_states_that_cannot_be_packed_are_refused(store: ObjectStore) -> None:
    with pytest.raises(StoreError, match="dtype 'int3'"):
        ShardWriter(store, PREFIX, PLAN, replace(META, dtype="int3"), OBJECT_BYTES)
    with pytest.raises(StoreError, match="multiple of 4"):
        ShardWriter(store, PREFIX, PLAN, replace(META, hidden_size=7), OBJECT_BYTES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine_version": "0.33.0"}, "engine version is '0.32.0', the round's is '0.33.0'"),
        ({"engine": "sglang"}, "engine is 'vllm'"),
        ({"taps": (3, 15)}, "taps"),
        ({"final": "unit_rms"}, "final"),
        ({"dtype": "f16"}, "dtype"),
        ({"hidden_size": 16}, "hidden size"),
        ({"target_revision": "other"}, "target revision"),
    ],
)
def test_states_of_another_origin_do_not_count(store: ObjectStore, change: dict[str, Any], message: str) -> None:
    write(store)
    assert message in fault(store, replace(META, **change), deep=False)
    assert fault(store, deep=False) == ""


def test_other_samples_do_not_count(store: ObjectStore) -> None:
    write(store)
    assert "row 3 was made from other token ids" in fault(
        store, tokens={**TOKENS, 3: [*TOKENS[3][:-1], 12345]}, deep=False
    )
    assert "row 3 has 6 tokens" in fault(store, tokens={**TOKENS, 3: TOKENS[3][:-1]}, deep=False)
    assert "row 19 has no sample" in fault(store, tokens={row: TOKENS[row] for row in range(19)}, deep=False)
    assert "planned are" in fault(store, plan=ShardPlan(0, 0, 19), deep=False)


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("damage", "message", "seen_by_size"),
    [
        (lambda data: flip(data, len(data) // 2), "checksum", False),
        (lambda data: flip(data, len(data) - 8), "checksum", False),
        (lambda data: flip(data, 20), "checksum", False),
        (lambda data: data[:-1], "bytes", True),
        (lambda data: data + b"\0", "bytes", True),
        (lambda data: b"", "bytes", True),
    ],
)
def test_damage_is_named(
    store: ObjectStore, damage: Callable[[bytes], bytes], message: str, seen_by_size: bool
) -> None:
    write(store)
    path = an_object(store)
    store.put(path, damage(store.get(path)))
    found = fault(store)
    assert message in found
    assert path.rsplit("/", 1)[-1] in found
    assert bool(fault(store, deep=False)) is seen_by_size


def test_a_missing_object_and_a_damaged_manifest_are_named(store: ObjectStore) -> None:
    write(store)
    path = an_object(store)
    store.delete(path)
    assert path in fault(store, deep=False)
    manifest = f"{shard_prefix(PREFIX, PLAN)}/manifest.parquet"
    whole = store.get(manifest)
    for damaged in (whole[: len(whole) // 2], b"", b"PAR1" + bytes(100) + b"PAR1"):
        store.put(manifest, damaged)
        assert "manifest.parquet cannot be read" in fault(store)
    assert discard_shard(store, PREFIX, PLAN) > 0
    assert "no manifest" in fault(store)
    assert write(store)
    assert fault(store) == ""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"[12,3,8]", b"[12,8,3]", "holds BF16 (12, 8, 3)"),
        (b'"BF16"', b'"F16" ', "holds F16"),
        (b'"hidden_states"', b'"something_els"', "does not start as packed hidden states do"),
        ((2).to_bytes(8, "little"), (3).to_bytes(8, "little"), "other token ids for row 0"),
    ],
)
def test_an_object_that_was_sealed_wrong_is_named(store: ObjectStore, old: bytes, new: bytes, message: str) -> None:
    """A writer's own fault: size and checksum agree, the content does not."""
    plan, rows = ShardPlan(0, 0, 4), {row: [1, 2, 4 + row] for row in range(4)}
    writer = ShardWriter(store, PREFIX, plan, META, OBJECT_BYTES)
    for row in plan.rows:
        writer.add(row, rows[row], states(0))
    assert writer.commit()
    manifest = read_manifest(store, PREFIX, plan)
    [name] = manifest.objects
    data = store.get(f"{shard_prefix(PREFIX, plan)}/{name}").replace(old, new)
    sealed = read_contents([memoryview(data)], [len(ids) for ids in rows.values()], TOKEN_BYTES).checksum
    store.put(f"{shard_prefix(PREFIX, plan)}/{name}", data)
    resealed = replace(manifest, objects={name: ObjectSeal(len(data), sealed)})
    store.put(f"{shard_prefix(PREFIX, plan)}/manifest.parquet", resealed.to_bytes())
    assert message in fault(store, plan=plan, tokens=rows)
    assert fault(store, plan=plan, tokens=rows, deep=False) == ""


def test_a_shard_moved_under_another_key_does_not_count(store: ObjectStore) -> None:
    write(store)
    for info in store.list(PREFIX):
        store.put(info.path.replace("/k/", "/other/"), store.get(info.path))
    found = verify_shard(store, "rounds/r/hidden/other", PLAN, META, TOKENS)
    assert "key k, not other" in str(found)


def test_the_second_writer_of_a_shard_steps_back(store: ObjectStore) -> None:
    slow = ShardWriter(store, PREFIX, PLAN, META, OBJECT_BYTES)
    for row in PLAN.rows:
        slow.add(row, TOKENS[row], states(row, seed=2))
    assert write(store, seed=1)
    assert not slow.commit()
    assert fault(store) == ""
    assert torch.equal(StatesReader(store.url, PREFIX).read(5)["hidden_states"], states(5, seed=1))
    named = read_manifest(store, PREFIX, PLAN).objects
    assert len(store.list(PREFIX)) == len(named) + 1


def test_reading_what_is_not_there_or_broken(store: ObjectStore) -> None:
    write(store)
    reader = StatesReader(store.url, PREFIX)
    with pytest.raises(StoreError, match="row 20"):
        reader.read(20)
    path = an_object(store)
    store.put(path, store.get(path)[:-10])
    with pytest.raises(StoreError, match="holds row 0, cannot be read"):
        reader.read(0)
    store.delete(path)
    with pytest.raises(StoreError, match="holds row 0, cannot be read"):
        StatesReader(store.url, PREFIX).read(0)


def test_changing_what_was_read_changes_no_file(store: ObjectStore) -> None:
    write(store)
    StatesReader(store.url, PREFIX).read(3)["hidden_states"].zero_()
    assert fault(store) == ""


def test_a_reader_travels_small_and_reads_on(store: ObjectStore) -> None:
    write(store)
    reader = StatesReader(store.url, PREFIX)
    reader.read(0)
    packed = pickle.dumps(reader)
    assert len(packed) < 10_000
    assert torch.equal(pickle.loads(packed).read(7)["hidden_states"], states(7))


def test_token_hashes_tell_ids_and_order_apart() -> None:
    assert token_hash([1, 2]) == token_hash(torch.tensor([1, 2]))
    assert len({token_hash([1, 2]), token_hash([2, 1]), token_hash([1, 2, 0]), token_hash([])}) == 4
