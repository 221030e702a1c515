"""One owner at a time across processes, by the kernel's file locks."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL_SECONDS = 0.2


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
