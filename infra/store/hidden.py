"""Shards of hidden states: planned by size, done when the manifest verifies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from infra.errors import StoreError
from infra.store.manifest import MANIFEST, Manifest, StatesMeta
from infra.store.objects import ObjectMissing, ObjectStore
from infra.store.packed import DTYPES, SAFETENSORS_NAMES, object_bytes, parse_header, read_contents, token_hash


@dataclass(frozen=True)
class ShardPlan:
    """Rows ``first_row`` to ``end_row`` (exclusive) make shard ``number``."""

    number: int
    first_row: int
    end_row: int

    @property
    def rows(self) -> range:
        """The shard's rows."""
        return range(self.first_row, self.end_row)


@dataclass(frozen=True)
class ShardFault:
    """Why a shard does not count as done.

    Attributes:
        missing: there is no manifest; nothing is wrong, it was just not made yet.
        sentence: what is wrong, for a person.
    """

    number: int
    sentence: str
    missing: bool = False

    def __str__(self) -> str:
        return self.sentence


def plan_shards(token_counts: Sequence[int], bytes_per_token: int, shard_bytes: int) -> list[ShardPlan]:
    """Cut rows 0, 1, 2 ... into runs of at most ``shard_bytes``; a longer row is a shard of its own.

    Args:
        token_counts: tokens of each row.
        bytes_per_token: bytes of one token's states.
        shard_bytes: bound of a shard, bytes.
    """
    plans: list[ShardPlan] = []
    first, held = 0, 0
    for row, tokens in enumerate(token_counts):
        size = tokens * bytes_per_token
        if row > first and held + size > shard_bytes:
            plans.append(ShardPlan(len(plans), first, row))
            first, held = row, 0
        held += size
    if len(token_counts) > first:
        plans.append(ShardPlan(len(plans), first, len(token_counts)))
    return plans


def state_bytes_per_token(taps: Sequence[int], hidden_size: int, dtype: str = "bf16") -> int:
    """Bytes of one token's states, the final slot included."""
    return int((len(taps) + 1) * hidden_size * DTYPES[dtype].itemsize)


def shard_prefix(prefix: str, plan: ShardPlan) -> str:
    """The shard's folder below the step's ``prefix``."""
    return f"{prefix}/{plan.number:05d}"


def discard_shard(store: ObjectStore, prefix: str, plan: ShardPlan) -> int:
    """Remove a shard that does not verify, manifest first, so it can be written anew. Returns the bytes freed."""
    return store.delete_tree(shard_prefix(prefix, plan))


def read_manifest(store: ObjectStore, prefix: str, plan: ShardPlan) -> Manifest:
    """The shard's manifest.

    Raises:
        ObjectMissing: the shard was not committed.
        StoreError: the manifest is damaged.
    """
    path = f"{shard_prefix(prefix, plan)}/{MANIFEST}"
    return Manifest.from_bytes(store.get(path), path)


def verify_shard(
    store: ObjectStore,
    prefix: str,
    plan: ShardPlan,
    meta: StatesMeta,
    tokens_by_row: Mapping[int, Sequence[int]],
    *,
    deep: bool = True,
) -> ShardFault | None:
    """Check a shard against what the round says it must be.

    Args:
        meta: what the states must be and come from.
        tokens_by_row: token ids of the shard's samples.
        deep: read the objects too (checksum, header, token ids); otherwise only their sizes are looked at.

    Returns:
        The first fault found, or None: the shard is done.
    """
    try:
        manifest = read_manifest(store, prefix, plan)
    except ObjectMissing:
        return ShardFault(plan.number, f"shard {plan.number} has no manifest", missing=True)
    except StoreError as error:
        return ShardFault(plan.number, str(error))
    try:
        for fault in _faults(store, prefix, plan, meta, tokens_by_row, manifest, deep):
            return ShardFault(plan.number, f"shard {plan.number}: {fault}")
    except StoreError as error:
        return ShardFault(plan.number, f"shard {plan.number}: {error}")
    return None


def _faults(
    store: ObjectStore,
    prefix: str,
    plan: ShardPlan,
    meta: StatesMeta,
    tokens_by_row: Mapping[int, Sequence[int]],
    manifest: Manifest,
    deep: bool,
) -> Iterator[str]:
    yield from _head_faults(plan, meta, manifest, step_key(prefix))
    yield from _row_faults(plan, tokens_by_row, manifest)
    folder = shard_prefix(prefix, plan)
    for name, seal in manifest.objects.items():
        size = store.size(f"{folder}/{name}")
        if size != seal.bytes:
            yield f"object {name} has {size} bytes, its manifest says {seal.bytes}"
        if deep:
            yield from _object_faults(store, folder, name, manifest)


def _head_faults(plan: ShardPlan, meta: StatesMeta, manifest: Manifest, key: str) -> Iterator[str]:
    found = (manifest.shard, manifest.first_row, manifest.end_row)
    if found != (plan.number, plan.first_row, plan.end_row):
        yield f"its manifest is of shard {found[0]}, rows {found[1]} to {found[2]}; planned are {plan}"
    if manifest.key != key:
        yield f"its manifest was made for key {manifest.key}, not {key}"
    for field in fields(StatesMeta):
        was, wanted = getattr(manifest.meta, field.name), getattr(meta, field.name)
        if was != wanted:
            yield f"its {field.name.replace('_', ' ')} is {was!r}, the round's is {wanted!r}"


def _row_faults(plan: ShardPlan, tokens_by_row: Mapping[int, Sequence[int]], manifest: Manifest) -> Iterator[str]:
    told = [*(place.row for place in manifest.rows), *manifest.quarantined]
    if sorted(told) != list(plan.rows):
        yield f"its manifest tells of {len(told)} rows, not of rows {plan.first_row} to {plan.end_row - 1} each once"
        return
    for place in manifest.rows:
        ids = tokens_by_row.get(place.row)
        if ids is None:
            yield f"row {place.row} has no sample"
        elif len(ids) != place.tokens:
            yield f"row {place.row} has {place.tokens} tokens, its sample has {len(ids)}"
        elif token_hash(ids) != place.token_hash:
            yield f"row {place.row} was made from other token ids than its sample's"
        if place.object not in manifest.objects:
            yield f"row {place.row} lies in object {place.object}, which the manifest does not seal"


def _object_faults(store: ObjectStore, folder: str, name: str, manifest: Manifest) -> Iterator[str]:
    """Reads the object once."""
    meta, was = manifest.meta, manifest.objects[name]
    places = [place for place in manifest.rows if place.object == name]
    wanted = (sum(place.tokens for place in places), len(meta.taps) + 1, meta.hidden_size)
    token_bytes = state_bytes_per_token(meta.taps, meta.hidden_size, meta.dtype)
    if was.bytes != object_bytes(wanted[0], token_bytes):
        yield f"object {name} has {was.bytes} bytes, its rows take {object_bytes(wanted[0], token_bytes)}"
        return
    counts = [place.tokens for place in places]
    found = read_contents(
        store.iter_pieces(f"{folder}/{name}"), counts, token_bytes, sha256=was.checksum.startswith("sha256:")
    )
    if found.checksum != was.checksum:
        yield f"object {name} is damaged: its bytes do not have the checksum in the manifest"
        return
    header = parse_header(found.header, name)
    if header.dtype != SAFETENSORS_NAMES.get(meta.dtype) or header.shape != wanted:
        yield f"object {name} holds {header.dtype} {header.shape}, its manifest says {meta.dtype} {wanted}"
        return
    ids = torch.frombuffer(bytearray(found.token_ids), dtype=torch.int64)
    for place in places:
        if token_hash(ids[place.first_token : place.first_token + place.tokens]) != place.token_hash:
            yield f"object {name} holds other token ids for row {place.row} than the manifest says"


def step_key(prefix: str) -> str:
    """Key of the step, from its folder."""
    return prefix.rsplit("/", 1)[-1]
