"""One owner at a time across processes, by the kernel's file locks; and one process a round."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from infra.errors import ConfigError

POLL_SECONDS = 0.2
LOOK_SECONDS = 0.5
"""Who only looks whether a round is being worked on holds its lock for a moment: so long is waited for that."""


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[int]:
    """Hold ``path`` (made if missing) alone; yields its file descriptor.

    The kernel lets go when the last process that has the descriptor is gone: give it to a child (``pass_fds``)
    and the lock outlives a killed parent for as long as that child still works.

    Args:
        path: the lock file; it stays there afterwards, empty.
        on_wait: called once when someone else holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            _wait(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _wait(descriptor: int) -> None:
    """Take the lock when it is let go; looked at again and again, so that whatever ends this thread ends the wait."""
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(POLL_SECONDS)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file now; looking takes it, shared, for a moment."""
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


@contextmanager
def round_lock(run_dir: Path, name: str) -> Iterator[None]:
    """Hold the lock file of the round ``name``; the kernel lets go of it when the process ends, however it ends.

    Raises:
        ConfigError: another process holds it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock_file(run_dir, name), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _take(descriptor, name)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def lock_file(run_dir: Path, name: str) -> Path:
    """The round's lock file, which need not exist."""
    return run_dir / f"round-{name}.lock"


def is_busy(run_dir: Path, name: str) -> bool:
    """Whether a process of this machine works on the round now."""
    return is_held(lock_file(run_dir, name))


def _take(descriptor: int, name: str) -> None:
    deadline = time.monotonic() + LOOK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                raise ConfigError(
                    f"round {name} is being worked on by process {holder}",
                    fix="wait for it, or cancel its run in the UI",
                ) from error
            time.sleep(LOOK_SECONDS / 10)
