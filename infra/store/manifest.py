"""The manifest: the Parquet file that makes a shard of hidden states exist."""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import StoreError

MANIFEST = "manifest.parquet"
_KEY = b"eagle3"
_FIELDS: dict[str, Any] = {
    "row": pa.int64(),
    "object": pa.string(),
    "first_token": pa.int64(),
    "tokens": pa.int64(),
    "token_hash": pa.string(),
}
_SCHEMA = pa.schema(_FIELDS)


@dataclass(frozen=True)
class StatesMeta:
    """What a shard's states are and where they come from.

    Attributes:
        taps: taps fed to the draft, ascending; slot ``len(taps)`` is the final state, tap L.
        final: what the final slot holds: the final state pre-norm, or y / w (its direction; y is the post-norm state, w
            the norm's weight).
        dtype: element type, ``bf16``.
        hidden_size: width of the residual stream.
        engine: engine that made them.
        engine_version: its version.
        target_revision: hash of the target that was loaded.
    """

    taps: tuple[int, ...]
    final: Literal["pre_norm", "unit_rms"]
    dtype: str
    hidden_size: int
    engine: str
    engine_version: str
    target_revision: str


@dataclass(frozen=True)
class RowPlace:
    """Where one row lies.

    Attributes:
        row: the sample's number in its round.
        object: name of the object, inside the shard's folder.
        first_token: index of its first token in the object.
        tokens: how many tokens.
        token_hash: see :func:`infra.store.packed.token_hash`.
    """

    row: int
    object: str
    first_token: int
    tokens: int
    token_hash: str


@dataclass(frozen=True)
class ObjectSeal:
    """An object's size and checksum.

    Attributes:
        bytes: its size.
        checksum: ``algorithm:hex``. The algorithm is ``xxh3-128-rows`` (:func:`infra.store.packed.seal`), or in older
            manifests ``sha256``, of all its bytes.
    """

    bytes: int
    checksum: str

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "ObjectSeal":
        """From a manifest, in which older ones call the checksum ``sha256``."""
        if "sha256" in entry:
            return cls(entry["bytes"], f"sha256:{entry['sha256']}")
        return cls(**entry)


@dataclass(frozen=True)
class Manifest:
    """All that is known of a committed shard.

    Attributes:
        key: key of the step that made it.
        created: when, ISO 8601, UTC.
        quarantined: rows of the shard that have no states, because the engine dies on them; not among ``rows``.
    """

    shard: int
    first_row: int
    end_row: int
    key: str
    created: str
    meta: StatesMeta
    objects: Mapping[str, ObjectSeal]
    rows: tuple[RowPlace, ...]
    quarantined: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """The manifest as Parquet: a line a row, everything else in the file's metadata."""
        head = asdict(self)
        places = head.pop("rows")
        head["objects"] = {name: asdict(seal) for name, seal in self.objects.items()}
        table = pa.Table.from_pylist(list(places), schema=_SCHEMA.with_metadata({_KEY: json.dumps(head).encode()}))
        stream = io.BytesIO()
        pq.write_table(table, stream)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Manifest":
        """Read what :meth:`to_bytes` wrote.

        Raises:
            StoreError: the bytes are damaged or no manifest; ``path`` names them.
        """
        try:
            table = pq.read_table(io.BytesIO(data))
            head: dict[str, Any] = json.loads(table.schema.metadata[_KEY])
            meta = head.pop("meta")
            return cls(
                **{name: head[name] for name in ("shard", "first_row", "end_row", "key", "created")},
                meta=StatesMeta(**{**meta, "taps": tuple(meta["taps"])}),
                objects={name: ObjectSeal.read(seal) for name, seal in head["objects"].items()},
                rows=tuple(RowPlace(**place) for place in table.to_pylist()),
                quarantined=tuple(head.get("quarantined", ())),
            )
        except (pa.ArrowException, KeyError, TypeError, ValueError, OSError) as error:
            raise StoreError(
                f"manifest {path} cannot be read: {error}", fix="delete it; its rows are extracted again"
            ) from error
