"""One process works on a round at a time on this machine."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from infra.errors import ConfigError
from infra.steps.context import Round


@contextmanager
def round_lock(round_: Round) -> Iterator[None]:
    """Hold the round's lock file; the kernel lets go of it when the process ends, however it ends.

    Raises:
        ConfigError: another process holds it.
    """
    folder = round_.settings.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"round-{round_.config.name}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"round {round_.config.name} is being worked on by process {holder}",
                fix="wait for it, or cancel its run in the UI",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
