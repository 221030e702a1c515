"""Whose the processes on a GPU are."""

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.machine.gpus.readings import Gpu
from infra.machine.processes import guard
from infra.machine.processes.guard import Identity
from infra.machine.processes.records import ProcessRecord, membership

Whose = Literal["leftover", "ours", "same user", "others", "gone"]


@dataclass(frozen=True)
class Holder:
    """A process that the driver names as one that holds memory of a GPU."""

    identity: Identity
    """Its creation time is 0 when no process has the pid."""
    memory: int | None
    """Bytes."""
    whose: Whose
    """``leftover``: of a run of this project whose owner is dead; ``ours``: of one that lives; ``gone``: it has ended
    or is defunct, and the memory is held nevertheless."""
    what: str
    """For people: its purpose or command, and its user."""

    @property
    def pid(self) -> int:
        """Its pid."""
        return self.identity.pid

    @property
    def lives(self) -> bool:
        """Whether there is a process behind it."""
        return self.whose != "gone"

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.what})"


def holders(gpu: Gpu, records: Mapping[int, ProcessRecord]) -> tuple[Holder, ...]:
    """The processes on a GPU and whose they are; ``records`` as ``records.membership`` gives it."""
    return tuple(_holder(pid, memory, records.get(pid)) for pid, memory in gpu.processes)


def recorded_processes(run_dir: Path) -> dict[int, ProcessRecord]:
    """This project's processes on this machine, by pid."""
    return membership(run_dir)


def _holder(pid: int, memory: int | None, record: ProcessRecord | None) -> Holder:
    process = guard.look_up(pid)
    if process is None:
        return Holder(Identity(pid, 0), memory, "gone", "ended")
    if not process.running:
        return Holder(process.identity, memory, "gone", "defunct")
    if record is not None:
        whose: Whose = "ours" if record.owner_alive else "leftover"
        return Holder(process.identity, memory, whose, record.purpose)
    uid = _uid(pid)
    whose = "same user" if uid == os.getuid() else "others"
    return Holder(process.identity, memory, whose, f"{_user(uid)}: {_command(pid)}")


def _uid(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def _user(uid: int | None) -> str:
    if uid is None:
        return "unknown user"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _command(pid: int) -> str:
    """The program's short name: arguments may hold secrets."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() or "?"
    except OSError:
        return "?"
