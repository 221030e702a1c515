"""Shards of hidden states: planned by size, written row by row, done when the manifest verifies."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime

import torch

from infra.errors import StoreError
from infra.store.manifest import MANIFEST, Manifest, ObjectSeal, RowPlace, StatesMeta
from infra.store.objects import ObjectMissing, ObjectStore
from infra.store.packed import DTYPES, HEADER_BYTES, SAFETENSORS_NAMES, ObjectBuilder, parse_header, token_hash


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


class ShardWriter:
    """Writes one shard, rows in order; nothing counts until :meth:`commit`.

    An object is put as soon as it is full, so memory holds one of them. Objects are named by their rows and
    their bytes' hash: a second writer of the same shard never overwrites what the first one's manifest names.

    Args:
        prefix: the step's folder, ``rounds/<round>/hidden/<key>``.
        object_bytes: bound of one object's states, bytes; a longer row is an object of its own.

    Raises:
        StoreError: states of this type or size cannot be packed.
    """

    def __init__(self, store: ObjectStore, prefix: str, plan: ShardPlan, meta: StatesMeta, object_bytes: int) -> None:
        if meta.dtype not in DTYPES:
            raise StoreError(f"states of dtype {meta.dtype!r} cannot be stored", expected=f"one of {sorted(DTYPES)}")
        if state_bytes_per_token(meta.taps, meta.hidden_size, meta.dtype) % 8:
            raise StoreError(
                f"a token's states of {len(meta.taps) + 1} x {meta.hidden_size} {meta.dtype} do not end on 8 bytes",
                expected="a hidden size that is a multiple of 4",
            )
        self._store, self._prefix, self._plan, self._meta = store, prefix, plan, meta
        self._bound = object_bytes
        self._places: list[RowPlace] = []
        self._quarantined: list[int] = []
        self._seals: dict[str, ObjectSeal] = {}
        self._next = plan.first_row
        self._builder = self._new_builder()

    def add(self, row: int, token_ids: torch.Tensor | Sequence[int], hidden_states: torch.Tensor) -> None:
        """Append the shard's next row.

        Args:
            row: its number; rows come in order, none left out.
            token_ids: int64 [tokens].
            hidden_states: [tokens, taps + 1, hidden] of the meta's dtype.

        Raises:
            StoreError: it is not the next row, the shapes disagree, or an object could not be written.
        """
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        expected = (len(ids), len(self._meta.taps) + 1, self._meta.hidden_size)
        self._check_turn(row)
        if tuple(hidden_states.shape) != expected or hidden_states.dtype != DTYPES[self._meta.dtype] or not len(ids):
            raise StoreError(
                f"row {row} has states {tuple(hidden_states.shape)} {hidden_states.dtype}",
                expected=f"{expected} {DTYPES[self._meta.dtype]}, one entry a token and at least one token",
            )
        size = hidden_states.numel() * hidden_states.element_size()
        if self._builder.rows and self._builder.state_bytes + size > self._bound:
            self._put_object()
        self._builder.add(row, ids, hidden_states)
        self._next += 1

    def quarantine(self, row: int) -> None:
        """Leave out the shard's next row: the manifest says so, and no reader finds it.

        Raises:
            StoreError: it is not the next row.
        """
        self._check_turn(row)
        self._quarantined.append(row)
        self._next += 1

    def _check_turn(self, row: int) -> None:
        if row != self._next or row >= self._plan.end_row:
            raise StoreError(f"row {row} came to shard {self._plan.number}", expected=f"row {self._next}")

    def commit(self) -> bool:
        """Put the manifest, if absent: from here on the shard is done.

        Returns:
            False when another writer's manifest was there first; this writer's objects are removed then.

        Raises:
            StoreError: rows are missing, or the store could not be written.
        """
        if self._next != self._plan.end_row:
            raise StoreError(
                f"shard {self._plan.number} ends at row {self._next}", expected=f"rows up to {self._plan.end_row}"
            )
        if self._builder.rows:
            self._put_object()
        manifest = Manifest(
            shard=self._plan.number,
            first_row=self._plan.first_row,
            end_row=self._plan.end_row,
            key=_key(self._prefix),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            meta=self._meta,
            objects=self._seals,
            rows=tuple(self._places),
            quarantined=tuple(self._quarantined),
        )
        folder = shard_prefix(self._prefix, self._plan)
        won = self._store.put(f"{folder}/{MANIFEST}", manifest.to_bytes(), if_absent=True)
        _sweep_unnamed(self._store, folder, None if won else set(self._seals))
        return won

    def _put_object(self) -> None:
        builder, self._builder = self._builder, self._new_builder()
        rows = builder.rows
        data = builder.finish()
        checksum = hashlib.sha256(data).hexdigest()
        name = f"{rows[0][0]:08d}-{rows[-1][0]:08d}-{checksum[:12]}.safetensors"
        self._store.put(f"{shard_prefix(self._prefix, self._plan)}/{name}", data)
        self._seals[name] = ObjectSeal(len(data), checksum)
        self._places += [RowPlace(row, name, first, tokens, digest) for row, first, tokens, digest in rows]

    def _new_builder(self) -> ObjectBuilder:
        return ObjectBuilder(self._meta.dtype, len(self._meta.taps) + 1, self._meta.hidden_size)


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
    yield from _head_faults(plan, meta, manifest, _key(prefix))
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
        elif token_hash(list(ids)) != place.token_hash:
            yield f"row {place.row} was made from other token ids than its sample's"
        if place.object not in manifest.objects:
            yield f"row {place.row} lies in object {place.object}, which the manifest does not seal"


def _object_faults(store: ObjectStore, folder: str, name: str, manifest: Manifest) -> Iterator[str]:
    path, meta = f"{folder}/{name}", manifest.meta
    if store.checksum(path) != manifest.objects[name].sha256:
        yield f"object {name} is damaged: its bytes do not have the checksum in the manifest"
        return
    header = parse_header(store.get_range(path, 0, HEADER_BYTES), name)
    places = [place for place in manifest.rows if place.object == name]
    wanted = (sum(place.tokens for place in places), len(meta.taps) + 1, meta.hidden_size)
    if header.dtype != SAFETENSORS_NAMES.get(meta.dtype) or header.shape != wanted:
        yield f"object {name} holds {header.dtype} {header.shape}, its manifest says {meta.dtype} {wanted}"
        return
    ids = torch.frombuffer(bytearray(store.get_range(path, header.ids_at, 8 * wanted[0])), dtype=torch.int64)
    for place in places:
        if token_hash(ids[place.first_token : place.first_token + place.tokens]) != place.token_hash:
            yield f"object {name} holds other token ids for row {place.row} than the manifest says"


def _sweep_unnamed(store: ObjectStore, folder: str, candidates: set[str] | None) -> None:
    """Remove objects that the committed manifest does not name (all such, or those among ``candidates``)."""
    path = f"{folder}/{MANIFEST}"
    named = set(Manifest.from_bytes(store.get(path), path).objects)
    for info in store.list(folder):
        name = info.path.rsplit("/", 1)[-1]
        if name != MANIFEST and name not in named and (candidates is None or name in candidates):
            store.delete(info.path)


def _key(prefix: str) -> str:
    return prefix.rsplit("/", 1)[-1]
