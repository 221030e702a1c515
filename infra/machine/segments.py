"""Shared memory that engines leave behind: which segments were ours, and which of those nobody uses any more.

A segment's name does not say whose it is. While a guarded process tree lives, the segments that it has mapped are noted
beside its pid file; a segment is a leftover when it is noted, is still the same file, belongs to this user, its tree is
gone, and no process that can be seen has it mapped or open.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.config.round import ENGINES
from infra.machine.disk import SHARED_MEMORY
from infra.machine.processes.guard import this_pid_scope, write_private
from infra.machine.processes.records import SUFFIX, trees

NOTE = ".shm.json"
PREFIXES = ("psm_", "nccl-", "torch_", "sem.", "__KMP_REGISTERED_LIB_", *ENGINES)
"""What NCCL, torch, OpenMP, Python's multiprocessing and engines (by their names) call their segments; no other is
touched."""


@dataclass(frozen=True)
class Segment:
    """A file of shared memory that a dead process tree of ours has left.

    Attributes:
        path: the file.
        size: bytes of memory that it holds.
        purpose: what the tree was for, such as ``vllm extract``.
    """

    path: Path
    size: int
    purpose: str


def note_segments(run_dir: Path, folder: Path = SHARED_MEMORY) -> None:
    """Note which segments the recorded process trees have mapped now, besides those noted before."""
    for saved in trees(run_dir):
        names: set[str] = set()
        for identity in saved.members():
            names |= _used_by(Path(f"/proc/{identity.pid}"), folder)
        path = _note_of(saved.path)
        known = _read(path).get("segments", {})
        found = {name: inode for name in names if name.startswith(PREFIXES) and (inode := _inode(folder / name))}
        if not found.items() <= known.items():
            place = {"host": saved.place.host, "boot": saved.place.boot}
            note = {**place, "purpose": saved.purpose, "segments": known | found}
            write_private(path, json.dumps(note))


def leftover_segments(run_dir: Path, folder: Path = SHARED_MEMORY) -> list[Segment]:
    """Segments of dead trees of ours that nobody uses."""
    living = {_note_of(saved.path) for saved in trees(run_dir) if saved.is_running(saved.owner) or saved.members()}
    notes = [note for path in sorted(run_dir.glob(f"*{NOTE}")) if path not in living and (note := _read(path))]
    boot = this_pid_scope().boot
    noted = {
        name: (inode, note["purpose"])
        for note in notes
        if note["boot"] == boot
        for name, inode in note["segments"].items()
    }
    used = _used_by_anyone(folder) if noted else set()
    found = []
    for name, (inode, purpose) in sorted(noted.items()):
        with suppress(FileNotFoundError):
            status = (folder / name).lstat()
            if (status.st_ino, status.st_uid) == (inode, os.geteuid()) and name not in used:
                found.append(Segment(folder / name, status.st_blocks * 512, purpose))
    return found


def forget_segments(run_dir: Path, folder: Path = SHARED_MEMORY) -> None:
    """Remove this host's notes of dead trees of which nothing is left."""
    here = this_pid_scope()
    living = {_note_of(saved.path) for saved in trees(run_dir)}
    for path in set(run_dir.glob(f"*{NOTE}")) - living:
        note = _read(path)
        there = any(_inode(folder / name) == inode for name, inode in note.get("segments", {}).items())
        if note.get("host", here.host) == here.host and (note.get("boot") != here.boot or not there):
            path.unlink(missing_ok=True)


def _note_of(pid_file: Path) -> Path:
    return pid_file.with_name(pid_file.name.removesuffix(SUFFIX) + NOTE)


def _read(path: Path) -> dict[str, Any]:
    """A note, or nothing when it is missing or damaged."""
    try:
        note = json.loads(path.read_text())
        segments = {str(name): int(inode) for name, inode in note["segments"].items()}
        return {name: str(note[name]) for name in ("host", "boot", "purpose")} | {"segments": segments}
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return {}


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return None


def _used_by_anyone(folder: Path) -> set[str]:
    found: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            found |= _used_by(process, folder)
    return found


def _used_by(process: Path, folder: Path) -> set[str]:
    """Names in ``folder`` that a process has mapped or open; nothing of one that is gone or may not be looked at."""
    return {Path(place).name for place in _places(process) if Path(place).parent == folder}


def _places(process: Path) -> Iterator[str]:
    with suppress(OSError):
        for line in (process / "maps").read_text(errors="replace").splitlines():
            yield line.partition("/")[1] + line.partition("/")[2]
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                yield os.readlink(descriptor)
