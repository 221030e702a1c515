"""File systems: how much room they have, which folders share one, and how a full one shows."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = tuple(f"{os.strerror(number)}".lower() for number in FULL)


@dataclass(frozen=True)
class FileSystem:
    """One file system at one moment.

    Attributes:
        device: its number (``st_dev``): folders with the same one share its room.
        mount: the folder at which it is mounted.
        total: its size, bytes.
        free: bytes that this user may still write.
    """

    device: int
    mount: Path
    total: int
    free: int


def existing(path: Path) -> Path:
    """The folder, or the nearest one above it that is there already."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place


def file_system(path: Path) -> FileSystem:
    """The file system that holds ``path``, which need not exist yet."""
    place = existing(path).resolve()
    device = place.stat().st_dev
    stats = os.statvfs(place)
    mount = place
    while mount.parent != mount and mount.parent.stat().st_dev == device:
        mount = mount.parent
    return FileSystem(device, mount, stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize)


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, says that a disk is full or a quota used up.

    Libraries that write in C++ or Rust (safetensors, Arrow) give the system's words instead of its number.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        text = str(error).lower()
        if any(words in text for words in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False
