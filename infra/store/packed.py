"""One object of hidden states: a safetensors file that many rows share, joined on the token axis.

``hidden_states`` [sum of tokens, taps + 1, hidden] comes first, ``token_ids`` int64 [sum of tokens] last.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from infra.errors import StoreError

# The header's room is fixed (safetensors lets it end in spaces), so rows are appended before their number is known.
HEADER_BYTES = 512
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SAFETENSORS_NAMES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


def token_hash(token_ids: torch.Tensor | list[int]) -> str:
    """SHA-256 (first 16 hex digits) of the ids as little-endian int64."""
    ids = token_ids if isinstance(token_ids, torch.Tensor) else torch.tensor(token_ids, dtype=torch.int64)
    return hashlib.sha256(raw_bytes(ids)).hexdigest()[:16]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, without a copy when it is contiguous."""
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class ObjectBuilder:
    """Collects rows into the bytes of one object; never holds them twice."""

    def __init__(self, dtype: str, slots: int, hidden_size: int) -> None:
        self._dtype, self._slots, self._hidden = dtype, slots, hidden_size
        self._data = bytearray(HEADER_BYTES)
        self._ids = bytearray()
        self.rows: list[tuple[int, int, int, str]] = []  # row, first token, tokens, hash of its ids

    @property
    def tokens(self) -> int:
        """Tokens collected so far."""
        return len(self._ids) // 8

    @property
    def state_bytes(self) -> int:
        """Bytes of hidden states collected so far."""
        return len(self._data) - HEADER_BYTES

    def add(self, row: int, token_ids: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Append one row; shapes and types are the caller's to check."""
        self.rows.append((row, self.tokens, len(token_ids), token_hash(token_ids)))
        self._data += raw_bytes(hidden_states)
        self._ids += raw_bytes(token_ids)

    def finish(self) -> bytearray:
        """The finished object; the builder is used up."""
        states, ids, tokens = self.state_bytes, len(self._ids), self.tokens
        header = {
            "hidden_states": {
                "dtype": SAFETENSORS_NAMES[self._dtype],
                "shape": [tokens, self._slots, self._hidden],
                "data_offsets": [0, states],
            },
            "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [states, states + ids]},
        }
        text = json.dumps(header, separators=(",", ":")).encode().ljust(HEADER_BYTES - 8)
        self._data[:HEADER_BYTES] = len(text).to_bytes(8, "little") + text
        self._data += self._ids
        return self._data


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
        StoreError: they are not the start of an object that :class:`ObjectBuilder` made.
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
