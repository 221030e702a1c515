"""Whether a store can do what a round asks of it, tried with one small object before the round begins."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from infra.errors import DiskFull, StoreError
from infra.store.objects import ObjectStore

PREFIX = "probe-"
FIRST, SECOND = b"0123456789", b"overwritten"
CHECKSUMS = "AWS_REQUEST_CHECKSUM_CALCULATION=when_required", {"request_checksum_calculation": "when_required"}
ANSWERS = "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required", {"response_checksum_validation": "when_required"}
PATHS = (
    "`s3 =` with `addressing_style = path` below it, in the profile of the file that AWS_CONFIG_FILE names",
    {"s3": {"addressing_style": "path"}},
)
"""Settings that mend a server's trouble, each with its name in botocore."""
Remedy = tuple[str, dict[str, Any]]


def store_faults(store: ObjectStore) -> list[StoreError]:
    """Put, read, ranged read, conditional put, upload in parts and delete of one small object.

    Returns:
        What the store cannot do, with what mends it.

    A remedy that has a setting is tried, and named only when it works. A full disk is not a fault of the store: how
    much room there is, and who waits for it, is the plan's business and the disk guard's.
    """
    path = f"{PREFIX}{secrets.token_hex(8)}"
    try:
        store.put(path, FIRST)
    except DiskFull:
        return []
    except StoreError as error:
        named = f"//{store.url.removeprefix('s3://').partition('/')[0]}."  # the bucket as a part of the host's name
        remedy = PATHS if named in error.what else CHECKSUMS
        return [_mended(store, error, remedy, lambda other: _write_and_forget(other, path))]
    looks = (_read_fault, _condition_fault, _parts_fault, _delete_fault)
    return [fault for look in looks for fault in look(store, path)]


def _read_fault(store: ObjectStore, path: str) -> Iterator[StoreError]:
    try:
        store.get(path)
    except StoreError as error:
        yield _mended(store, error, ANSWERS, lambda other: other.get(path))
    else:
        yield from _range_fault(store, path)


def _range_fault(store: ObjectStore, path: str) -> Iterator[StoreError]:
    """Rows are read out of large objects by ranges."""
    try:
        part = store.get_range(path, 2, 3)
    except StoreError as error:
        if "ends early" not in error.what:
            yield _mended(store, error, ANSWERS, lambda other: other.get_range(path, 2, 3))
            return
        part = b""
    if part != FIRST[2:5]:
        yield StoreError(
            f"the store {store.url} ignores Range: it does not give 3 bytes of an object, but others",
            expected="ranged reads, for rows are read out of large objects",
            fix="see that no proxy before the server drops the header; else use another server, or a folder",
        )


def _condition_fault(store: ObjectStore, path: str) -> Iterator[StoreError]:
    """Of two writers of a manifest one must win."""
    fresh = f"{path}-new"
    fix = "no setting mends this: bring the server up to date, or use another one, or a folder"
    try:
        overwrote = store.put(path, SECOND, if_absent=True)
        placed = store.put(fresh, FIRST, if_absent=True)
    except DiskFull:
        return
    except StoreError as error:
        yield StoreError(
            f"the store {store.url} refuses a conditional write (If-None-Match): {error.what}",
            expected="a write only if the object is absent, so that of two writers one wins",
            fix=fix,
        )
        return
    finally:
        _forget(store, fresh)
    with suppress(StoreError):  # the look at reading says it
        overwrote = overwrote or store.get(path) != FIRST
    if overwrote or not placed:
        how = "overwrote an object that it was told to leave" if overwrote else "would not write one that was absent"
        yield StoreError(
            f"the store {store.url} does not keep to If-None-Match: it {how}",
            expected="a write only if the object is absent, so that of two writers one wins",
            fix=fix,
        )


def _parts_fault(store: ObjectStore, path: str) -> Iterator[StoreError]:
    """Large objects are written in parts."""
    try:
        store.try_parts(path)
    except StoreError as error:
        yield StoreError(
            error.what,
            expected="uploads in parts, as large objects are written",
            fix="let these credentials write and abort them, or use another server, or a folder",
        )


def _delete_fault(store: ObjectStore, path: str) -> Iterator[StoreError]:
    """What does not verify is deleted and made again, and old states are deleted for new ones."""
    try:
        store.delete(path)
    except StoreError as error:
        yield StoreError(
            f"objects cannot be deleted, {path} is left behind: {error.what}",
            expected="the right to delete what a round has written",
            fix="let these credentials delete objects (s3:DeleteObject), or mount the folder for writing",
        )
        return
    try:
        left = store.exists(path)
    except StoreError as error:
        yield StoreError(
            f"what is in the store cannot be looked at: {error.what}",
            expected="the right to list the objects of a round",
            fix="let these credentials list the bucket (s3:ListBucket)",
        )
        return
    if left:
        found = f"the store {store.url} says that {path} is deleted, and it is still there"
        yield StoreError(found, fix="ask its owner to let objects be deleted")


def _write_and_forget(store: ObjectStore, path: str) -> None:
    store.put(path, FIRST)
    _forget(store, path)


def _forget(store: ObjectStore, path: str) -> None:
    try:
        store.delete(path)
    except StoreError:
        return  # the look at deleting says it


def _mended(
    store: ObjectStore, error: StoreError, remedy: Remedy, again: Callable[[ObjectStore], object]
) -> StoreError:
    """The error, with the remedy in the place of a general advice where it was tried and works."""
    setting, config = remedy
    if store.url.startswith("s3://") and (remedy is PATHS or _answered(error)):
        with suppress(StoreError):
            again(store.configured(config))
            return StoreError(error.what, expected=error.expected, fix=f"set {setting} (tried just now: it works)")
    return error


def _answered(error: StoreError) -> bool:
    """Whether a server answered at all: where none does, another request only takes its time."""
    from infra.store.advice import code_of  # folders need none of the S3 packages

    return error.__cause__ is not None and bool(code_of(error.__cause__))
