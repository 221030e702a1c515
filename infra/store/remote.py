"""A store in an S3 bucket, through s3fs: one PUT or one completed multipart upload an object."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import fsspec
import numpy as np
from botocore.exceptions import BotoCoreError, ClientError
from botocore.utils import get_environ_proxies

from infra.config.base import URL_PASSWORD
from infra.errors import StoreError
from infra.machine.network import is_loopback
from infra.store.advice import advice, code_of
from infra.store.base import ObjectInfo, ObjectMissing

PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 4
READ_BYTES = 32 << 20
ABANDONED_SECONDS = 24 * 3600.0
CONFLICT_ATTEMPTS = 5
TROUBLE = (OSError, BotoCoreError, ClientError, aiohttp.ClientError, TimeoutError, RecursionError)
"""botocore follows a server that sends it in a circle until Python ends that."""
Result = TypeVar("Result")


class BucketBackend:
    """Objects below ``bucket/prefix``; endpoint and credentials are the environment's (``AWS_*``).

    Args:
        client: settings of botocore's client.
    """

    def __init__(self, url: str, client: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/")
        # Listings must be true now, and instances shared with other code would share its cache.
        self._fs: Any = fsspec.filesystem(
            "s3", use_listings_cache=False, skip_instance_cache=True, config_kwargs=_reach(client)
        )
        self._root: str = self._fs._strip_protocol(self._url)
        try:
            self._fs.connect()
        except (BotoCoreError, ValueError, OSError) as error:
            raise StoreError(
                f"the store {self._url} cannot be opened: {error}", fix="correct the AWS_* variables of the environment"
            ) from error

    def put(self, path: str, data: bytes | bytearray | Path, if_absent: bool) -> bool:
        for attempt in range(CONFLICT_ATTEMPTS):
            try:
                self._upload(path, data, "create" if if_absent else "overwrite")
                return True
            except TROUBLE as error:
                code = code_of(error)
                if if_absent and (isinstance(error, FileExistsError) or code in {"PreconditionFailed", "412"}):
                    return False
                if code in {"ConditionalRequestConflict", "409"} and attempt + 1 < CONFLICT_ATTEMPTS:
                    time.sleep(0.1 * 2**attempt)
                    continue
                raise self._trouble(f"could not write {path}", error) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    def try_parts(self, path: str) -> None:
        bucket, _, key = self._at(path).partition("/")
        begun = self._call(
            f"could not begin an upload of {path} in parts",
            lambda: self._fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key),
        )
        self._abort(bucket, key, begun["UploadId"])

    def begin(self, folder: str, size: int) -> "BufferedUpload":
        return BufferedUpload(self, size)

    def get(self, path: str) -> bytes:
        return self._read(path, lambda: bytes(self._fs.cat_file(self._at(path))))

    def get_range(self, path: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        return self._read(path, lambda: bytes(self._fs.cat_file(self._at(path), start=start, end=start + length)))

    def iter_pieces(self, path: str) -> Iterator[memoryview]:
        left, start = self.size(path), 0
        if left is None:
            raise ObjectMissing(f"could not read {path}: it is not in {self._url}")
        while left:
            piece = self.get_range(path, start, min(left, READ_BYTES))
            if not piece:
                return  # it became shorter; whoever reads it counts
            yield memoryview(piece)
            start, left = start + len(piece), left - len(piece)

    def size(self, path: str) -> int | None:
        try:
            info = self._call(f"could not look at {path}", lambda: self._fs.info(self._at(path)))
        except ObjectMissing:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def iter_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        where = self._at(prefix)
        found = self._call(f"could not list {prefix or 'the store'}", lambda: self._fs.find(where, detail=True))
        for name, info in sorted(found.items()):
            inside = name[len(self._root) :].lstrip("/")
            if prefix and not inside.startswith(f"{prefix}/"):
                continue  # the object called like the prefix is not below it
            yield ObjectInfo(inside, int(info["size"]))

    def folders(self, prefix: str) -> list[str]:
        try:
            entries = self._call(f"could not list {prefix}", lambda: self._fs.ls(self._at(prefix), detail=True))
        except ObjectMissing:
            return []
        return sorted(entry["name"].rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory")

    def delete(self, path: str) -> None:
        try:
            self._call(f"could not delete {path}", lambda: self._fs.rm_file(self._at(path)))
        except ObjectMissing:
            return

    def prune(self, prefix: str) -> None:
        """A bucket has no folders to remove."""

    def local_path(self, path: str) -> Path | None:
        return None

    def sweep_temporaries(self, older_than_seconds: float | None) -> int:
        """Abort multipart uploads begun before the bound (a day); nothing tells whether their writer still lives."""
        swept = 0
        for upload in self._unfinished(older_than_seconds):
            self._abort(self._root.partition("/")[0], upload["Key"], upload["UploadId"])
            swept += 1
        return swept

    def temporaries(self, older_than_seconds: float | None) -> Iterator[ObjectInfo]:
        """Unfinished uploads; a bucket does not tell their sizes in its listing, so they count as 0 bytes."""
        for upload in self._unfinished(older_than_seconds):
            inside = upload["Key"].removeprefix(self._root.partition("/")[2]).lstrip("/")
            yield ObjectInfo(inside, 0)

    def _unfinished(self, older_than_seconds: float | None) -> Iterator[dict[str, Any]]:
        bound = time.time() - (ABANDONED_SECONDS if older_than_seconds is None else older_than_seconds)
        bucket, _, prefix = self._root.partition("/")
        where: dict[str, Any] = {"Bucket": bucket, "Prefix": f"{prefix}/" if prefix else ""}
        while True:
            page = self._call(
                "could not list unfinished uploads", partial(self._fs.call_s3, "list_multipart_uploads", **where)
            )
            yield from (upload for upload in page.get("Uploads", []) if upload["Initiated"].timestamp() <= bound)
            if not page.get("IsTruncated"):
                return
            where |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _upload(self, path: str, data: bytes | bytearray | Path, mode: str) -> None:
        how: dict[str, Any] = {"mode": mode, "chunksize": PART_BYTES, "max_concurrency": PARTS_IN_FLIGHT}
        if isinstance(data, Path):
            self._fs.put_file(str(data), self._at(path), **how)
        else:
            self._fs.pipe_file(self._at(path), data, **how)

    def _abort(self, bucket: str, key: str, upload: str) -> None:
        try:
            self._call(
                f"could not abort the unfinished upload of {key}",
                lambda: self._fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload),
            )
        except ObjectMissing:
            return  # it ended meanwhile

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _read(self, path: str, work: Callable[[], Result]) -> Result:
        return self._call(f"could not read {path}", work)

    def _call(self, what: str, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except FileNotFoundError as error:
            raise ObjectMissing(f"{what}: it is not in {self._url}") from error
        except TROUBLE as error:
            raise self._trouble(what, error) from error

    def _trouble(self, what: str, error: BaseException) -> StoreError:
        kind, said = code_of(error) or type(error).__name__, URL_PASSWORD.sub("://***@", str(error))
        return StoreError(f"{what} in {self._url}: {kind}: {said}", fix=advice(error))


class BufferedUpload:
    """An object that is filled in memory, for a bucket takes its bytes in sequence."""

    def __init__(self, backend: BucketBackend, size: int) -> None:
        self._backend = backend
        self._data = bytearray(size)

    def write(self, offset: int, data: memoryview) -> None:
        room = np.frombuffer(self._data, dtype=np.uint8, count=len(data), offset=offset)
        np.copyto(room, np.frombuffer(data, dtype=np.uint8))  # other threads run meanwhile

    def place(self, path: str, size: int, if_absent: bool) -> bool:
        data = self._data
        if len(data) < size:
            raise StoreError(f"{path} was given up before it was whole")
        del data[size:]
        return self._backend.put(path, data, if_absent)

    def discard(self) -> None:
        self._data = bytearray()


def _reach(client: Mapping[str, Any]) -> dict[str, Any]:
    """The client's settings, such that a server on loopback is reached without a proxy.

    Raises:
        StoreError: the environment names a proxy that this client cannot use.
    """
    named = (os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"))
    endpoint = next((url for url in named if url), "https://s3.amazonaws.com")
    if is_loopback(endpoint):
        return {"proxies": {}, **client}
    scheme = endpoint.partition(":")[0]
    proxy = get_environ_proxies(endpoint).get(scheme, "")
    if proxy.startswith("socks"):
        raise StoreError(
            f"an S3 store cannot be reached through the SOCKS proxy of {scheme.upper()}_PROXY",
            expected="an HTTP proxy, or none",
            fix="name the server's host in NO_PROXY, or give the address of an HTTP proxy",
        )
    return dict(client)
