"""Objects in a store: a folder or an S3 bucket, with one atomic write."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from infra.errors import DiskFull, StoreError
from infra.store.base import TEMPORARY_PREFIX, Backend, ObjectInfo, ObjectMissing, Upload
from infra.store.filesystem import FolderBackend

__all__ = ["ObjectInfo", "ObjectMissing", "ObjectStore", "store_environment"]

# What makes other objects count is deleted before them, so a broken-off delete leaves no manifest of nothing.
MARKERS = frozenset({"current.json", "manifest.parquet", "manifest.json", "done.json"})
Result = TypeVar("Result")
Names = list[str]  # inside the class, `list` is the method
Infos = list[ObjectInfo]


class ObjectStore:
    """Named objects below one URL.

    Picklable; connections are opened at first use and never travel to another process.

    Args:
        url: ``file:///folder`` (or a plain path) or ``s3://bucket/prefix``, reached as the environment says
            (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY`` ...).

    Attributes:
        on_full: called when a write finds no room; the write is tried again when it returns. None: such a write fails.

    Raises:
        StoreError: the URL is of no kind that this store can write to atomically.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._client: dict[str, Any] = {}
        self._backend: Backend | None = None
        self.on_full: Callable[[DiskFull], object] | None = None
        if "://" in self.url and not self.url.startswith(("file://", "s3://")):
            raise StoreError(
                f"the store {self.url} is of a kind that is not supported",
                expected="file:///folder or s3://bucket/prefix",
                fix="set EAGLE3_STORE_URL",
            )

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_backend": None, "on_full": None}

    def configured(self, config: Mapping[str, Any]) -> Self:
        """The same store through a client with these settings of botocore's; nothing changes for a folder."""
        store = type(self)(self.url)
        store._client = {**self._client, **config}
        return store

    def put(self, path: str, data: bytes | bytearray | Path, *, if_absent: bool = False) -> bool:
        """Write one object: afterwards it is there whole, or the store is as before.

        Args:
            path: where, ``/`` between the parts.
            data: the bytes, or a file that is streamed.
            if_absent: do not overwrite; of several writers exactly one wins.

        Returns:
            False when ``if_absent`` and the object was there already.

        Raises:
            DiskFull: there is no room for it, and ``on_full`` does not make any; nothing is left behind.
            StoreError: it could not be written for another reason; nothing is left behind.
        """
        return self.through(lambda: self._open.put(_checked(path), data, if_absent))

    def begin(self, folder: str, size: int) -> Upload:
        """Begin an object of at most ``size`` bytes that will lie in ``folder``; it is filled in pieces.

        Raises:
            DiskFull: as :meth:`put`.
            StoreError: it could not be begun for another reason.
        """
        return self.through(lambda: self._open.begin(_checked(folder), size))

    def through(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns; it is called again each time that it finds no room and ``on_full`` made some.

        Raises:
            DiskFull: there is no ``on_full``.
        """
        while True:
            try:
                return work()
            except DiskFull as error:
                if self.on_full is None:
                    raise
                self.on_full(error)

    def try_parts(self, path: str) -> None:
        """Begin to write an object in parts, as large ones are written, and abandon it.

        Raises:
            StoreError: the server refuses that.
        """
        self._open.try_parts(_checked(path))

    def get(self, path: str) -> bytes:
        """The whole object.

        Raises:
            ObjectMissing: it is not there.
        """
        return self._open.get(_checked(path))

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """``length`` bytes from byte ``start``.

        Raises:
            ObjectMissing: it is not there.
            StoreError: the object ends before.
        """
        data = self._open.get_range(_checked(path), start, length)
        if len(data) != length:
            raise StoreError(
                f"object {path} ends early: {len(data)} bytes from byte {start}", expected=f"{length} bytes"
            )
        return data

    def iter_pieces(self, path: str) -> Iterator[memoryview]:
        """The object's bytes in pieces of bounded size, each valid until the next is asked for.

        Raises:
            ObjectMissing: it is not there.
        """
        return self._open.iter_pieces(_checked(path))

    def exists(self, path: str) -> bool:
        """Whether the object is there. Its being there proves nothing about its bytes."""
        return self._open.size(_checked(path)) is not None

    def size(self, path: str) -> int:
        """Size in bytes.

        Raises:
            ObjectMissing: it is not there.
        """
        size = self._open.size(_checked(path))
        if size is None:
            raise ObjectMissing(f"there is no object {path} in {self.url}")
        return size

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """The objects below the folder ``prefix``, by path; half-written ones are not among them."""
        return sorted(self._open.iter_objects(_checked(prefix) if prefix else ""), key=lambda info: info.path)

    def folders(self, prefix: str) -> Names:
        """Names of the folders right below ``prefix``, sorted."""
        return self._open.folders(_checked(prefix) if prefix else "")

    def delete(self, path: str) -> None:
        """Remove the object; it may be gone already."""
        self._open.delete(_checked(path))

    def delete_tree(self, prefix: str) -> int:
        """Remove everything below ``prefix``; manifests and pointers go first. Returns the bytes freed."""
        found = self.list(prefix)
        for info in sorted(found, key=lambda info: info.path.rsplit("/", 1)[-1] not in MARKERS):
            self._open.delete(info.path)
        self._open.prune(prefix)
        return sum(info.size for info in found)

    def local_path(self, path: str) -> Path | None:
        """The object's file when the store is a folder, else None."""
        return self._open.local_path(_checked(path))

    def temporaries(self, older_than_seconds: float | None = None) -> Infos:
        """What :meth:`sweep_temporaries` would remove now."""
        return sorted(self._open.temporaries(older_than_seconds), key=lambda info: info.path)

    def sweep_temporaries(self, older_than_seconds: float | None = None) -> int:
        """Remove what writers left that died while writing; a living writer's is never touched.

        Args:
            older_than_seconds: leave what is younger. Default: a minute in a folder (where a lock tells the
                dead from the living), a day for a bucket's unfinished uploads (where only age does).

        Returns:
            How many leftovers went.
        """
        return self._open.sweep_temporaries(older_than_seconds)

    @property
    def _open(self) -> Backend:
        if self._backend is None:
            if self.url.startswith("s3://"):
                from infra.store.remote import BucketBackend  # folders need none of the S3 packages

                self._backend = BucketBackend(self.url, self._client)
            else:
                self._backend = FolderBackend(Path(self.url.removeprefix("file://")).absolute())
        return self._backend


def store_environment(url: str) -> dict[str, str]:
    """Variables of this process that another one needs to reach the store: ``AWS_*`` for a bucket, none for a folder.

    A cleaned environment leaves the secrets out; only a process that reads the store gets them.
    """
    if not url.startswith("s3://"):
        return {}
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def _checked(path: str) -> str:
    """The path, if every part of it is a plain name."""
    parts = path.split("/")
    if any(part in {"", ".", ".."} or part.startswith(TEMPORARY_PREFIX) or "\0" in part for part in parts):
        raise StoreError(
            f"{path!r} is no path inside a store", expected="names joined by /, none empty, '.', '..' or '.put-...'"
        )
    return path
