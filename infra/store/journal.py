"""A journal on local disk: one JSON line an entry, one writer, safe to kill at any byte."""

import errno
import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from infra.errors import DiskFull, StoreError
from infra.machine.disk import is_full

SYNC_ENTRIES = 64
SYNC_SECONDS = 2.0


class Journal:
    """Appends entries, each with one write; a kill loses at most the entry being written.

    Entries reach the disk itself (fsync) every 64 entries or 2 seconds: a power cut loses no more.

    Attributes:
        entries: what the journal held when it was opened, in order; lines that were torn or damaged are cut away.

    Args:
        path: the journal's file; its folder is made.

    Raises:
        StoreError: another process has the journal open, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._trouble("opened", error) from error
        try:
            self._claim()
            self.entries = self._recover()
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except BaseException:
            os.close(self._lock)
            raise
        self._unsynced, self._synced_at = 0, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, entry: dict[str, Any]) -> None:
        """Add one entry.

        Raises:
            DiskFull: there is no room for it; the journal is as before.
            StoreError: it could not be written whole for another reason; the journal is as before.
        """
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        end = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were taken; the disk is full")
            self._unsynced += 1
            if self._unsynced >= SYNC_ENTRIES or time.monotonic() - self._synced_at >= SYNC_SECONDS:
                os.fsync(self._file)
                self._unsynced, self._synced_at = 0, time.monotonic()
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, end)  # an entry that could not be synced is not there either
            raise self._trouble("written", error) from error

    def clear(self) -> None:
        """Forget all entries: they are safe elsewhere."""
        try:
            os.ftruncate(self._file, 0)
            os.fsync(self._file)
        except OSError as error:
            raise self._trouble("emptied", error) from error

    def close(self) -> None:
        """Let another process have the journal, whatever happens.

        Raises:
            DiskFull: there was no room for the last entries (a quota, mostly); what there is of them may be lost.
            StoreError: they did not reach the disk for another reason.
        """
        try:
            try:
                os.fsync(self._file)
            finally:
                os.close(self._file)
        except OSError as error:
            raise self._trouble("closed", error) from error
        finally:
            os.close(self._lock)

    def _claim(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(
                f"another process is writing the journal {self.path}",
                fix="wait until the other run of this round has ended, or cancel it",
            ) from error

    def _recover(self) -> list[dict[str, Any]]:
        """The whole lines; if others are among them, the file is replaced by one without."""
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._trouble("read", error) from error
        kept = [(line, entry) for line in lines if (entry := _parse(line)) is not None]
        if len(kept) < len(lines):
            self._replace([line for line, _ in kept])
        return [entry for _, entry in kept]

    def _replace(self, lines: list[bytes]) -> None:
        fresh = self.path.with_name(self.path.name + ".fresh")
        try:
            with fresh.open("wb") as stream:
                stream.writelines(lines)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(fresh, self.path)
        except OSError as error:
            raise self._trouble("mended", error) from error
        finally:
            fresh.unlink(missing_ok=True)

    def _trouble(self, what: str, error: OSError) -> StoreError:
        found = f"the journal {self.path} could not be {what}: {error.strerror or error}"
        return DiskFull(found, place=self.path.parent) if is_full(error) else StoreError(found)


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
