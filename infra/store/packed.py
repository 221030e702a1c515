"""One object of hidden states: a safetensors file that many rows share, joined on the token axis.

``hidden_states`` [sum of tokens, taps + 1, hidden] comes first, ``token_ids`` int64 [sum of tokens] last.
"""

import hashlib
import json
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from xxhash import xxh3_128

from infra.errors import StoreError
from infra.store.base import Upload

# The header's room is fixed (safetensors lets it end in spaces), so rows are placed before their number is known.
HEADER_BYTES = 512
ID_BYTES = 8
PIECE_BYTES = 1 << 20
"""States are hashed and written in pieces that stay in a core's cache between the two."""
SEAL = "xxh3-128-rows"
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SAFETENSORS_NAMES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


def token_hash(token_ids: torch.Tensor | Sequence[int]) -> str:
    """SHA-256 (first 16 hex digits) of the ids as little-endian int64."""
    ids = raw_bytes(token_ids) if isinstance(token_ids, torch.Tensor) else array("q", token_ids)
    return hashlib.sha256(ids).hexdigest()[:16]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, without a copy when it is contiguous."""
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def seal(header: bytes, rows: Iterable[bytes], token_ids: bytes) -> str:
    """An object's checksum, ``xxh3-128-rows:`` and 32 hex digits; rows may be hashed apart, in any order.

    It is the xxh3-128 of what follows each other here: the header, the xxh3-128 (16 bytes, big-endian) of each row's
    states, the token ids.
    """
    digest = xxh3_128(header)
    for row in rows:
        digest.update(row)
    digest.update(token_ids)
    return f"{SEAL}:{digest.hexdigest()}"


@dataclass(frozen=True)
class PackedRow:
    """A row's place in an object: ``tokens`` tokens from ``first_token``, and the hash of its ids."""

    row: int
    first_token: int
    tokens: int
    token_hash: str


class ObjectWriter:
    """Fills one object: rows get their places in sequence, and their states come in any order, from any threads.

    Args:
        upload: where its bytes go.
        dtype: element type of the states, a name of ``DTYPES``.
        slots: taps + 1.
        hidden_size: width of the residual stream.
    """

    def __init__(self, upload: Upload, dtype: str, slots: int, hidden_size: int) -> None:
        self.upload = upload
        self.settling = threading.Lock()
        self.rows: list[PackedRow] = []
        self.tokens = 0
        self._dtype, self._slots, self._hidden = dtype, slots, hidden_size
        self._token_bytes = slots * hidden_size * DTYPES[dtype].itemsize
        self._ids: list[bytes] = []
        self._digests: list[bytes | None] = []

    @property
    def state_bytes(self) -> int:
        """Bytes of the hidden states that have a place."""
        return self.tokens * self._token_bytes

    @property
    def is_filled(self) -> bool:
        """Whether the states of every row that has a place are there."""
        return None not in self._digests

    def reserve(self, row: int, token_ids: torch.Tensor) -> int:
        """Give the next row its place; its index among the object's rows."""
        self.rows.append(PackedRow(row, self.tokens, len(token_ids), token_hash(token_ids)))
        self.tokens += len(token_ids)
        self._ids.append(bytes(raw_bytes(token_ids)))
        self._digests.append(None)
        return len(self.rows) - 1

    def fill(self, index: int, hidden_states: torch.Tensor) -> None:
        """Write one row's states; shapes and types are the caller's to check. May be done again."""
        data, digest = raw_bytes(hidden_states), xxh3_128()
        at = HEADER_BYTES + self.rows[index].first_token * self._token_bytes
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            digest.update(piece)
            self.upload.write(at + start, piece)
        self._digests[index] = digest.digest()

    def finish(self) -> tuple[int, str]:
        """Write header and token ids once every row is filled; the object's (bytes, checksum)."""
        header = header_bytes(self._dtype, self.tokens, self._slots, self._hidden)
        ids = b"".join(self._ids)
        self.upload.write(0, memoryview(header))
        self.upload.write(HEADER_BYTES + self.state_bytes, memoryview(ids))
        rows = [digest for digest in self._digests if digest is not None]
        return object_bytes(self.tokens, self._token_bytes), seal(header, rows, ids)


def object_bytes(tokens: int, token_bytes: int) -> int:
    """Bytes of an object of so many tokens, each with so many bytes of states."""
    return HEADER_BYTES + tokens * (token_bytes + ID_BYTES)


def header_bytes(dtype: str, tokens: int, slots: int, hidden_size: int) -> bytes:
    """The first ``HEADER_BYTES`` bytes of an object."""
    states = tokens * slots * hidden_size * DTYPES[dtype].itemsize
    header = {
        "hidden_states": {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": [tokens, slots, hidden_size],
            "data_offsets": [0, states],
        },
        "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [states, states + ID_BYTES * tokens]},
    }
    text = json.dumps(header, separators=(",", ":")).encode().ljust(HEADER_BYTES - 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Contents:
    """What an object holds besides states: its header, its token ids, and the checksum of all of it."""

    header: bytes
    token_ids: bytes
    checksum: str


def read_contents(
    pieces: Iterable[memoryview], token_counts: Sequence[int], token_bytes: int, *, sha256: bool = False
) -> Contents:
    """Read an object once, from its first byte to its last.

    Args:
        pieces: its bytes; no piece is looked at once the next was asked for.
        token_counts: of its rows, in sequence.
        token_bytes: bytes of one token's states.
        sha256: reckon the checksum of older manifests.

    Raises:
        StoreError: it ends early.
    """
    whole = hashlib.sha256() if sha256 else None
    stream = _Stream(pieces, whole)
    header = b"".join(stream.take(HEADER_BYTES))
    rows = []
    for count in token_counts:
        digest = xxh3_128()
        for piece in stream.take(count * token_bytes):
            if whole is None:
                digest.update(piece)
        rows.append(digest.digest())
    ids = b"".join(stream.take(ID_BYTES * sum(token_counts)))
    return Contents(header, ids, f"sha256:{whole.hexdigest()}" if whole else seal(header, rows, ids))


class _Stream:
    """Bytes that come in pieces, taken in other pieces; ``whole`` hashes what was taken."""

    def __init__(self, pieces: Iterable[memoryview], whole: "hashlib._Hash | None") -> None:
        self._pieces, self._whole = iter(pieces), whole
        self._rest = memoryview(b"")

    def take(self, size: int) -> Iterator[memoryview]:
        while size:
            if not self._rest and not (rest := next(self._pieces, memoryview(b""))):
                raise StoreError(f"an object ends {size} bytes early")
            self._rest = self._rest or rest
            piece, self._rest = self._rest[:size], self._rest[size:]
            size -= len(piece)
            if self._whole is not None:
                self._whole.update(piece)
            yield piece


@dataclass(frozen=True)
class PackedHeader:
    """Where an object's tensors lie.

    Attributes:
        dtype: of ``hidden_states``, safetensors' spelling.
        shape: tokens, slots (taps + 1), hidden size.
        states_at: byte at which ``hidden_states`` begins in the object.
        ids_at: byte at which ``token_ids`` begins.
        end: bytes of the whole object.
    """

    dtype: str
    shape: tuple[int, int, int]
    states_at: int
    ids_at: int
    end: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's states."""
        return (self.ids_at - self.states_at) // max(self.shape[0], 1)


def parse_header(start: bytes, name: str) -> PackedHeader:
    """Read an object's first ``HEADER_BYTES`` bytes.

    Raises:
        StoreError: they are not the start of an object that :class:`ObjectWriter` made.
    """
    try:
        length = int.from_bytes(start[:8], "little")
        if length != HEADER_BYTES - 8:
            raise ValueError(f"header of {length} bytes")
        header: dict[str, Any] = json.loads(start[8:HEADER_BYTES])
        states, ids = header["hidden_states"], header["token_ids"]
        tokens, slots, hidden = states["shape"]
        (begin, middle), (ids_begin, end) = states["data_offsets"], ids["data_offsets"]
        if (begin, middle) != (0, ids_begin) or ids["shape"] != [tokens] or end - ids_begin != 8 * tokens:
            raise ValueError("its tensors do not agree")
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"object {name} does not start as packed hidden states do: {error}") from error
    return PackedHeader(
        states["dtype"], (tokens, slots, hidden), HEADER_BYTES, HEADER_BYTES + middle, HEADER_BYTES + end
    )
