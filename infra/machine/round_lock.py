"""One process works on a round at a time on this machine."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.errors import ConfigError
from infra.machine.filelock import is_held

LOOK_SECONDS = 0.5
"""Who only looks whether a round is being worked on holds its lock for a moment: so long is waited for that."""


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
