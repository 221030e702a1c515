"""What every store backend offers, and the words they share."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infra.errors import StoreError

TEMPORARY_PREFIX = ".put-"


class ObjectMissing(StoreError):
    """The object asked for is not in the store."""


@dataclass(frozen=True)
class ObjectInfo:
    """One object of a store.

    Attributes:
        path: path inside the store, parts joined by ``/``.
        size: bytes.
    """

    path: str
    size: int


class Upload(Protocol):
    """An object on its way into a store: filled in pieces, from any threads, and not there until it is placed."""

    def write(self, offset: int, data: memoryview) -> None:
        """Fill in bytes from ``offset``; may be called by several threads at once, for other bytes.

        Raises:
            DiskFull: there is no room for them.
            StoreError: they could not be written for another reason.
        """
        ...

    def place(self, path: str, size: int, if_absent: bool) -> bool:
        """Give the first ``size`` bytes their place, as ``put`` does; may be tried again after a ``DiskFull``.

        Returns:
            False when ``if_absent`` and the object was there already.
        """
        ...

    def discard(self) -> None:
        """Leave nothing behind; does nothing to an object that has its place."""
        ...


class Backend(Protocol):
    """The operations behind :class:`infra.store.objects.ObjectStore`; paths arrive validated."""

    def put(self, path: str, data: bytes | bytearray | Path, if_absent: bool) -> bool: ...

    def try_parts(self, path: str) -> None: ...

    def begin(self, folder: str, size: int) -> Upload: ...

    def get(self, path: str) -> bytes: ...

    def get_range(self, path: str, start: int, length: int) -> bytes: ...

    def iter_pieces(self, path: str) -> Iterator[memoryview]: ...

    def size(self, path: str) -> int | None: ...

    def iter_objects(self, prefix: str) -> Iterator[ObjectInfo]: ...

    def folders(self, prefix: str) -> list[str]: ...

    def delete(self, path: str) -> None: ...

    def prune(self, prefix: str) -> None: ...

    def local_path(self, path: str) -> Path | None: ...

    def temporaries(self, older_than_seconds: float | None) -> Iterator[ObjectInfo]: ...

    def sweep_temporaries(self, older_than_seconds: float | None) -> int: ...
