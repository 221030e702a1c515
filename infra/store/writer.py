"""Writing a shard of hidden states, row by row, by as many threads as bring them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from infra.errors import StoreError
from infra.store.hidden import ShardPlan, shard_prefix, state_bytes_per_token, step_key
from infra.store.manifest import MANIFEST, Manifest, ObjectSeal, RowPlace, StatesMeta
from infra.store.objects import ObjectStore
from infra.store.packed import DTYPES, ObjectWriter, object_bytes


@dataclass(frozen=True)
class RowRoom:
    """The place of one row in a shard that is being written."""

    row: int
    _writer: "ShardWriter"
    _object: ObjectWriter
    _index: int

    def fill(self, hidden_states: torch.Tensor) -> None:
        """Write the row's states there; any thread may, in any order, and again after an error.

        Whoever brings the last row of an object puts it into the store.

        Args:
            hidden_states: [tokens, taps + 1, hidden] of the meta's dtype.

        Raises:
            DiskFull: there is no room; nobody was asked to make some.
            StoreError: the shapes disagree, or the object could not be written.
        """
        self._writer.check(self.row, self._object.rows[self._index].tokens, hidden_states)
        self._object.fill(self._index, hidden_states)
        self._writer.settle(self._object)


class ShardWriter:
    """Writes one shard; nothing counts until :meth:`commit`.

    Rows get their places in sequence. An object is put as soon as it is full, so few are open at once. Objects are
    named by their rows and their checksum: a second writer of the same shard never overwrites what the first one's
    manifest names.

    Args:
        prefix: the step's folder, ``rounds/<round>/hidden/<key>``.
        object_bytes: bound of one object's states, bytes; a longer row is an object of its own.

    Raises:
        StoreError: states of this type or size cannot be packed.
    """

    def __init__(self, store: ObjectStore, prefix: str, plan: ShardPlan, meta: StatesMeta, object_bytes: int) -> None:
        if meta.dtype not in DTYPES:
            raise StoreError(f"states of dtype {meta.dtype!r} cannot be stored", expected=f"one of {sorted(DTYPES)}")
        self._token_bytes = state_bytes_per_token(meta.taps, meta.hidden_size, meta.dtype)
        if self._token_bytes % 8:
            raise StoreError(
                f"a token's states of {len(meta.taps) + 1} x {meta.hidden_size} {meta.dtype} do not end on 8 bytes",
                expected="a hidden size that is a multiple of 4",
            )
        self._store, self._prefix, self._plan, self._meta = store, prefix, plan, meta
        self._bound = object_bytes
        self._objects: list[ObjectWriter] = []
        self._quarantined: list[int] = []
        self._seals: dict[ObjectWriter, tuple[str, ObjectSeal]] = {}
        self._next = plan.first_row
        self._open: ObjectWriter | None = None

    def add(self, row: int, token_ids: torch.Tensor | Sequence[int], hidden_states: torch.Tensor) -> None:
        """Append the shard's next row, states and all; the arguments are those of :meth:`reserve` and of its room.

        Raises:
            StoreError: it is not the next row, the shapes disagree, or an object could not be written.
        """
        self._check_turn(row)
        self.check(row, len(token_ids), hidden_states)
        room = self.reserve(row, token_ids)
        self._store.through(lambda: room.fill(hidden_states))

    def reserve(self, row: int, token_ids: torch.Tensor | Sequence[int]) -> RowRoom:
        """Give the shard's next row its place.

        Args:
            row: its number; rows come in order, none left out.
            token_ids: int64 [tokens].

        Raises:
            StoreError: it is not the next row, or no object could be begun.
        """
        self._check_turn(row)
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        if self._open is not None and self._open.state_bytes + len(ids) * self._token_bytes > self._bound:
            self._close_object()
        if self._open is None:
            self._begin_object(len(ids))
        assert self._open is not None
        room = RowRoom(row, self, self._open, self._open.reserve(row, ids))
        self._went_on()
        return room

    def quarantine(self, row: int) -> None:
        """Leave out the shard's next row: the manifest says so, and no reader finds it.

        Raises:
            StoreError: it is not the next row.
        """
        self._check_turn(row)
        self._quarantined.append(row)
        self._went_on()

    def check(self, row: int, tokens: int, hidden_states: torch.Tensor) -> None:
        """See that these can be the row's states (raises StoreError)."""
        expected = (tokens, len(self._meta.taps) + 1, self._meta.hidden_size)
        if tuple(hidden_states.shape) != expected or hidden_states.dtype != DTYPES[self._meta.dtype] or not tokens:
            raise StoreError(
                f"row {row} has states {tuple(hidden_states.shape)} {hidden_states.dtype}",
                expected=f"{expected} {DTYPES[self._meta.dtype]}, one entry a token and at least one token",
            )

    def settle(self, packed: ObjectWriter) -> None:
        """Put an object into the store if it gets no more rows and all that it has are there."""
        with packed.settling:
            if packed is self._open or not packed.is_filled or packed in self._seals:
                return
            size, checksum = packed.finish()
            first, last = packed.rows[0].row, packed.rows[-1].row
            name = f"{first:08d}-{last:08d}-{checksum.partition(':')[2][:12]}.safetensors"
            packed.upload.place(f"{shard_prefix(self._prefix, self._plan)}/{name}", size, if_absent=False)
            self._seals[packed] = name, ObjectSeal(size, checksum)

    def commit(self) -> bool:
        """Put the manifest, if absent: from here on the shard is done.

        Returns:
            False when another writer's manifest was there first; this writer's objects are removed then.

        Raises:
            StoreError: rows or their states are missing, or the store could not be written.
        """
        if self._next != self._plan.end_row:
            raise StoreError(
                f"shard {self._plan.number} ends at row {self._next}", expected=f"rows up to {self._plan.end_row}"
            )
        if len(self._seals) != len(self._objects):
            raise StoreError(f"shard {self._plan.number} lacks the states of some of its rows")
        seals = dict(self._seals[packed] for packed in self._objects)  # in their order, whichever was full first
        manifest = Manifest(
            shard=self._plan.number,
            first_row=self._plan.first_row,
            end_row=self._plan.end_row,
            key=step_key(self._prefix),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            meta=self._meta,
            objects=seals,
            rows=tuple(
                RowPlace(place.row, self._seals[packed][0], place.first_token, place.tokens, place.token_hash)
                for packed in self._objects
                for place in packed.rows
            ),
            quarantined=tuple(self._quarantined),
        )
        folder = shard_prefix(self._prefix, self._plan)
        won = self._store.put(f"{folder}/{MANIFEST}", manifest.to_bytes(), if_absent=True)
        _sweep_unnamed(self._store, folder, None if won else set(seals))
        return won

    def discard(self) -> None:
        """Give up: of objects that have no place yet nothing is left."""
        for packed in self._objects:
            packed.upload.discard()

    def _check_turn(self, row: int) -> None:
        if row != self._next or row >= self._plan.end_row:
            raise StoreError(f"row {row} came to shard {self._plan.number}", expected=f"row {self._next}")

    def _begin_object(self, tokens: int) -> None:
        most = max(self._bound // self._token_bytes, tokens)
        upload = self._store.begin(shard_prefix(self._prefix, self._plan), object_bytes(most, self._token_bytes))
        self._open = ObjectWriter(upload, self._meta.dtype, len(self._meta.taps) + 1, self._meta.hidden_size)
        self._objects.append(self._open)

    def _went_on(self) -> None:
        self._next += 1
        if self._next == self._plan.end_row:
            self._close_object()

    def _close_object(self) -> None:
        """The open object gets no more rows."""
        packed, self._open = self._open, None
        if packed is not None:
            self._store.through(lambda: self.settle(packed))


def _sweep_unnamed(store: ObjectStore, folder: str, candidates: set[str] | None) -> None:
    """Remove objects that the committed manifest does not name (all such, or those among ``candidates``)."""
    path = f"{folder}/{MANIFEST}"
    named = set(Manifest.from_bytes(store.get(path), path).objects)
    for info in store.list(folder):
        name = info.path.rsplit("/", 1)[-1]
        if name != MANIFEST and name not in named and (candidates is None or name in candidates):
            store.delete(info.path)
