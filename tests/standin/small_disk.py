"""A small file system of its own, and a ballast that fills it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from infra.machine.disk import file_system


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """``folder`` as a tmpfs of ``size`` bytes; the test is skipped where none may be mounted."""
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Put a ballast file into a file system so that at most ``leave`` bytes are free; deleting it makes room."""
    ballast = folder / "ballast"
    descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while (size := file_system(folder).free - leave) > 0:
            with suppress(OSError):  # somebody else took room meanwhile
                os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, size)
    finally:
        os.close(descriptor)
    return ballast
