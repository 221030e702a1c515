"""Reading hidden states by row, whatever holds them: mapped files in a folder, ranged requests from S3."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from infra.errors import StoreError
from infra.store.manifest import MANIFEST, Manifest, RowPlace
from infra.store.objects import ObjectStore
from infra.store.packed import DTYPES, HEADER_BYTES, SAFETENSORS_NAMES, PackedHeader, parse_header

OPEN_OBJECTS = 64
MANIFESTS_AT_ONCE = 8
Value = TypeVar("Value")
TORCH = {SAFETENSORS_NAMES[name]: dtype for name, dtype in DTYPES.items()}


def read_manifests(store: ObjectStore, prefix: str) -> list[tuple[str, Manifest]]:
    """(folder, manifest) of every committed shard below ``prefix``.

    Raises:
        StoreError: a manifest is damaged.
    """
    paths = [info.path for info in store.list(prefix) if info.path.endswith(f"/{MANIFEST}")]
    with ThreadPoolExecutor(MANIFESTS_AT_ONCE) as pool:
        manifests = pool.map(lambda path: Manifest.from_bytes(store.get(path), path), paths)
        return [(path.rsplit("/", 1)[0], manifest) for path, manifest in zip(paths, manifests, strict=True)]


def quarantined_rows(store: ObjectStore, prefix: str) -> list[int]:
    """Rows that the committed shards below ``prefix`` leave out, ascending; raises as :func:`read_manifests`."""
    return sorted(row for _, manifest in read_manifests(store, prefix) for row in manifest.quarantined)


class StatesReader:
    """Rows of all committed shards of one extraction.

    Picklable and lazy: manifests are read once, at first use, and travel with the pickle; files and
    connections are opened by the process that reads. Safe to use from several threads.

    Args:
        url: the store's URL.
        prefix: the step's folder, ``rounds/<round>/hidden/<key>``.
        cache_bytes: memory for rows fetched from S3, so that a row read again soon is not fetched again.
    """

    def __init__(self, url: str, prefix: str, *, cache_bytes: int = 256 << 20) -> None:
        self._store = ObjectStore(url)
        self._prefix = prefix
        self._cache_bytes = cache_bytes
        self._index: dict[int, tuple[str, RowPlace]] | None = None
        self._start()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("_store", "_prefix", "_cache_bytes", "_index")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def rows(self) -> list[int]:
        """Rows that can be read, ascending."""
        return sorted(self._places())

    def read(self, row: int) -> dict[str, torch.Tensor]:
        """One row: ``hidden_states`` [tokens, taps + 1, hidden] and ``token_ids`` int64 [tokens].

        From a folder, the tensors lie in the mapped file: nothing is copied, and pages are read when touched.

        Raises:
            StoreError: no committed shard holds the row, or its object is missing or cut short.
        """
        path, place = self._place(row)
        if self._store.local_path(path) is not None:
            return self._read_mapped(path, place)
        return self._read_ranged(path, place)

    def _read_mapped(self, path: str, place: RowPlace) -> dict[str, torch.Tensor]:
        end = place.first_token + place.tokens
        try:
            with self._lock:
                handle = self._files.get(path, lambda: safe_open(str(self._store.local_path(path)), framework="pt"))
                return {
                    name: handle.get_slice(name)[place.first_token : end] for name in ("hidden_states", "token_ids")
                }
        except (OSError, SafetensorError) as error:
            raise StoreError(
                f"object {path}, which holds row {place.row}, cannot be read: {error}",
                fix="start the round again: the shard is verified and extracted anew",
            ) from error

    def _read_ranged(self, path: str, place: RowPlace) -> dict[str, torch.Tensor]:
        with self._lock:
            head = self._heads.get(path, lambda: self._fetch_head(path))
            data = self._states.get(place.row)
        if data is None:
            size = head.header.token_bytes
            start = head.header.states_at + place.first_token * size
            data = self._store.get_range(path, start, place.tokens * size)
            with self._lock:
                self._states.add(place.row, data)
        states = torch.frombuffer(bytearray(data), dtype=TORCH[head.header.dtype])
        end = place.first_token + place.tokens
        return {
            "hidden_states": states.reshape(place.tokens, *head.header.shape[1:]),
            "token_ids": head.token_ids[place.first_token : end].clone(),
        }

    def _fetch_head(self, path: str) -> "_Head":
        header = parse_header(self._store.get_range(path, 0, HEADER_BYTES), path)
        ids = self._store.get_range(path, header.ids_at, header.end - header.ids_at)
        return _Head(header, torch.frombuffer(bytearray(ids), dtype=torch.int64))

    def _place(self, row: int) -> tuple[str, RowPlace]:
        try:
            return self._places()[row]
        except KeyError:
            raise StoreError(
                f"no committed shard below {self._prefix} holds row {row}",
                fix="finish the extraction of this round first",
            ) from None

    def _places(self) -> dict[int, tuple[str, RowPlace]]:
        with self._lock:
            if self._index is None:
                self._index = self._load()
            return self._index

    def _load(self) -> dict[int, tuple[str, RowPlace]]:
        index: dict[int, tuple[str, RowPlace]] = {}
        for folder, manifest in read_manifests(self._store, self._prefix):
            for place in manifest.rows:
                if place.row in index:
                    raise StoreError(f"row {place.row} is in two shards below {self._prefix}", fix=f"delete {folder}")
                index[place.row] = (f"{folder}/{place.object}", place)
        return index

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._files: _Recent[Any] = _Recent(OPEN_OBJECTS)
        self._heads: _Recent[_Head] = _Recent(OPEN_OBJECTS)
        self._states = _RecentBytes(self._cache_bytes)


@dataclass(frozen=True)
class _Head:
    """What is kept of an S3 object: its header and all its token ids (8 bytes a token, under 1 % of the states)."""

    header: PackedHeader
    token_ids: torch.Tensor


class _Recent(Generic[Value]):
    """The values used last, at most ``bound`` of them."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._values: OrderedDict[str, Value] = OrderedDict()

    def get(self, name: str, make: Callable[[], Value]) -> Value:
        if name not in self._values:
            self._values[name] = make()
            if len(self._values) > self._bound:
                self._values.popitem(last=False)
        self._values.move_to_end(name)
        return self._values[name]


class _RecentBytes:
    """The rows used last, at most ``bound`` bytes of them."""

    def __init__(self, bound: int) -> None:
        self._bound, self._held = bound, 0
        self._values: OrderedDict[int, bytes] = OrderedDict()

    def get(self, row: int) -> bytes | None:
        if row in self._values:
            self._values.move_to_end(row)
        return self._values.get(row)

    def add(self, row: int, data: bytes) -> None:
        if row in self._values or len(data) > self._bound:
            return
        self._values[row] = data
        self._held += len(data)
        while self._held > self._bound:
            self._held -= len(self._values.popitem(last=False)[1])
