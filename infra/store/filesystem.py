"""A store in a folder: an object appears whole or not at all."""

import errno
import fcntl
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from infra.errors import DiskFull, StoreError
from infra.machine.disk import is_full
from infra.store.base import TEMPORARY_PREFIX, ObjectInfo, ObjectMissing

YOUNG_SECONDS = 60.0
PIECE_BYTES = 1 << 20


class FolderBackend:
    """Objects as files below ``root``.

    A writer holds a lock on its temporary file for as long as it lives, so a sweep knows dead writers'
    leftovers from files being written, whichever process, container or host writes them.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, path: str, data: bytes | bytearray | Path, if_absent: bool) -> bool:
        with self.told(f"write {path}"):
            file = TemporaryFile(self.root, (self.root / path).parent)
            try:
                _fill(file.descriptor, data)
                return file.place(self.root / path, if_absent)
            finally:
                file.discard()

    def begin(self, folder: str, size: int) -> "FileUpload":
        return FileUpload(self, folder, size)

    def try_parts(self, path: str) -> None:
        """A file has no parts."""

    def get(self, path: str) -> bytes:
        with self.told(f"read {path}"), self._open(path) as stream:
            return stream.read()

    def get_range(self, path: str, start: int, length: int) -> bytes:
        with self.told(f"read {path}"), self._open(path) as stream:
            stream.seek(start)
            return stream.read(length)

    def iter_pieces(self, path: str) -> Iterator[memoryview]:
        room = memoryview(bytearray(PIECE_BYTES))
        with self.told(f"read {path}"), self._open(path) as stream:
            while count := stream.raw.readinto(room):
                yield room[:count]

    def size(self, path: str) -> int | None:
        target = self.root / path
        with self.told(f"look at {path}"):
            try:
                return target.stat().st_size if target.is_file() else None
            except FileNotFoundError:
                return None

    def iter_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        for folder, _, names in os.walk(self.root / prefix, onerror=self._unless_gone):
            for name in names:
                if name.startswith(TEMPORARY_PREFIX):
                    continue
                file = Path(folder, name)
                with suppress(FileNotFoundError):  # deleted since the folder was read
                    status = file.stat()
                    yield ObjectInfo(file.relative_to(self.root).as_posix(), status.st_size)

    def folders(self, prefix: str) -> list[str]:
        with self.told(f"list {prefix or 'the store'}"):
            try:
                with os.scandir(self.root / prefix) as entries:
                    return sorted(entry.name for entry in entries if entry.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, path: str) -> None:
        with self.told(f"delete {path}"):
            (self.root / path).unlink(missing_ok=True)

    def prune(self, prefix: str) -> None:
        """Remove the empty folders below ``prefix``, itself included; those that fill up meanwhile stay."""
        for folder, _, _ in os.walk(self.root / prefix, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()

    def local_path(self, path: str) -> Path | None:
        return self.root / path

    def temporaries(self, older_than_seconds: float | None) -> Iterator[ObjectInfo]:
        """Files younger than the bound (a minute) are left: their writer may be about to lock them."""
        bound = time.time() - (YOUNG_SECONDS if older_than_seconds is None else older_than_seconds)
        for file in self._temporaries():
            with (
                self.told(f"look at {file}"),
                suppress(FileNotFoundError, BlockingIOError),
                _abandoned(file, bound) as status,
            ):
                if status is not None:
                    yield ObjectInfo(file.relative_to(self.root).as_posix(), status.st_size)

    def sweep_temporaries(self, older_than_seconds: float | None) -> int:
        """Removes what :meth:`temporaries` names."""
        bound = time.time() - (YOUNG_SECONDS if older_than_seconds is None else older_than_seconds)
        swept = 0
        for file in self._temporaries():
            with (
                self.told(f"remove {file}"),
                suppress(FileNotFoundError, BlockingIOError),
                _abandoned(file, bound) as status,
            ):
                if status is not None:
                    file.unlink()
                    swept += 1
        return swept

    def _temporaries(self) -> Iterator[Path]:
        for folder, _, names in os.walk(self.root):
            yield from (Path(folder, name) for name in names if name.startswith(TEMPORARY_PREFIX))

    def _open(self, path: str) -> BufferedReader:
        try:
            return (self.root / path).open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissing(f"there is no object {path} below {self.root}") from error

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Turn the operating system's trouble into the store's."""
        try:
            yield
        except OSError as error:
            found = f"could not {what} below {self.root}: {error.strerror or error}"
            if is_full(error):
                raise DiskFull(found, place=self.root) from error
            raise StoreError(
                found, fix=f"see that {self.root} is a folder that this user may read and write"
            ) from error

    def _unless_gone(self, error: OSError) -> None:
        """A folder that cannot be read must not pass for an empty one."""
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            with self.told(f"list {error.filename}"):
                raise error


class TemporaryFile:
    """A file in ``folder`` under a name that no reader looks at, locked for as long as its writer lives.

    Attributes:
        descriptor: open for writing until the file has its place or nobody refers to this object any more: a thread
            that still writes after :meth:`discard` must not find the number in use for another file.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._placed: bool | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        self.descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self.descriptor)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        except OSError:
            self.discard()
            raise

    def place(self, target: Path, if_absent: bool) -> bool:
        """Make the file durable and give it its name; False when another has that name and ``if_absent``.

        Nobody may write any more.
        """
        if self._placed is None:
            os.fsync(self.descriptor)
            self._placed = _place(self._path, target, if_absent)
        _sync_folders(target.parent, self._root)
        self.discard()
        self._close()
        return self._placed

    def discard(self) -> None:
        """Remove the temporary name; a file that was placed has another."""
        with suppress(OSError):
            self._path.unlink()


class FileUpload:
    """An object that is filled in its own temporary file.

    Its room is taken at the start, so a full disk is found before the bytes are asked for.
    """

    def __init__(self, backend: FolderBackend, folder: str, size: int) -> None:
        self._backend, self._folder = backend, folder
        with backend.told(f"make room for {size:,} bytes in {folder}"):
            self._file = TemporaryFile(backend.root, backend.root / folder)
            try:
                _take_room(self._file.descriptor, size)
            except OSError:
                self._file.discard()
                raise

    def write(self, offset: int, data: memoryview) -> None:
        with self._backend.told(f"write in {self._folder}"):
            while data:
                written = os.pwrite(self._file.descriptor, data, offset)
                data, offset = data[written:], offset + written

    def place(self, path: str, size: int, if_absent: bool) -> bool:
        with self._backend.told(f"write {path}"):
            os.ftruncate(self._file.descriptor, size)
            return self._file.place(self._backend.root / path, if_absent)

    def discard(self) -> None:
        self._file.discard()


def _take_room(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot: writes will tell
            raise


def _fill(descriptor: int, data: bytes | bytearray | Path) -> None:
    with open(descriptor, "wb", closefd=False) as stream:
        if isinstance(data, Path):
            with data.open("rb") as source:
                shutil.copyfileobj(source, stream, 8 << 20)
        else:
            stream.write(data)


def _place(temporary: Path, target: Path, if_absent: bool) -> bool:
    """Give the finished file its name; a hard link never overwrites, a rename does."""
    if not if_absent:
        os.replace(temporary, target)
        return True
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    return True


def _sync_folders(folder: Path, root: Path) -> None:
    """Make the new name durable, and the folders' own names up to the root: they may be new too."""
    while True:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if folder == root or folder == folder.parent:
            return
        folder = folder.parent


@contextmanager
def _abandoned(file: Path, bound: float) -> Iterator[os.stat_result | None]:
    """Hold a dead writer's file; None when it is too young, BlockingIOError when its writer lives.

    A shared lock shuts writers out and takes a file that may only be read; an exclusive one fails then on NFS (EBADF).
    """
    with file.open("rb") as stream:
        status = os.fstat(stream.fileno())
        if status.st_mtime <= bound:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield status
        else:
            yield None
