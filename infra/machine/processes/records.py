"""Pid files: who runs under a guard, whose it is, and ending what has lost its owner."""

import json
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from infra.errors import ProcessFailed
from infra.machine.processes import guard
from infra.machine.processes.guard import Identity, PidScope, this_pid_scope
from infra.machine.processes.namespaces import is_gone

SUFFIX = ".pid.json"
KILL_SECONDS = 2.0
"""Time that processes get to disappear after KILL."""

_TEMPORARY_SECONDS = 60.0
_DAMAGED = (ValueError, KeyError, TypeError, OverflowError)
"""What reading a file raises that is no record: it is written whole or not at all, but a machine may lose power."""


@dataclass(frozen=True)
class ProcessRecord:
    """A pid file, and what is true of it now; what runs on another host or in another container counts as alive."""

    guard_pid: int
    child_pid: int
    owner_pid: int
    purpose: str
    command: tuple[str, ...]
    log: Path
    alive: bool
    """Whether the guard or the command still runs."""
    owner_alive: bool
    started: datetime
    path: Path


@dataclass(frozen=True)
class Reaped:
    """A record that was removed because its owner is dead."""

    record: ProcessRecord
    ended: tuple[int, ...]
    """Pids that had to be ended; empty when nothing was left of it."""


@dataclass(frozen=True)
class Saved:
    """A pid file's content."""

    path: Path
    place: PidScope
    guard: Identity
    child: Identity
    owner: Identity
    mark: str
    grace: float
    purpose: str
    command: tuple[str, ...]
    log: Path
    started: datetime

    @classmethod
    def of(cls, path: Path, data: Mapping[str, Any]) -> Self:
        """The content as JSON gives it; ValueError, KeyError or TypeError when something is missing."""
        return cls(
            path=path,
            place=PidScope(str(data["host"]), str(data["boot"]), str(data["namespace"])),
            guard=Identity(*map(int, data["guard"])),
            child=Identity(*map(int, data["child"])),
            owner=Identity(*map(int, data["owner"])),
            mark=str(data["mark"]),
            grace=float(data["grace"]),
            purpose=str(data["purpose"]),
            command=tuple(map(str, data["command"])),
            log=Path(data["log"]),
            started=datetime.fromisoformat(data["started"]).astimezone(UTC),
        )

    @property
    def here(self) -> bool:
        """Whether its pids are this process's own: the same run of the same machine, in one PID namespace.

        A container that shares the machine's pids has another host name, and a host may be given another.
        """
        now = this_pid_scope()
        return (self.place.boot, self.place.namespace) == (now.boot, now.namespace)

    def is_running(self, identity: Identity) -> bool:
        """Whether one of this record's processes still runs; as far as that cannot be told from here, it does.

        Host and containers may share a folder of records, and so may machines: another place's processes are dead for
        certain only when that host has been restarted since, or when the machine sees its container gone.
        """
        now = this_pid_scope()
        if self.here:
            return guard.is_running(identity)
        if self.place.boot == now.boot:
            return not is_gone(self.place.namespace)
        return self.place.host != now.host

    def record(self) -> ProcessRecord:
        """What people may see of it."""
        return ProcessRecord(
            guard_pid=self.guard.pid,
            child_pid=self.child.pid,
            owner_pid=self.owner.pid,
            purpose=self.purpose,
            command=self.command,
            log=self.log,
            alive=self.is_running(self.guard) or self.is_running(self.child),
            owner_alive=self.is_running(self.owner),
            started=self.started,
            path=self.path,
        )

    def members(self) -> set[Identity]:
        """Every process of the tree that runs here: the guard, what descends from it or from the command, and orphans.

        Orphans that no guard took are told by the mark in their environment. A program may have overwritten the
        memory that shows its environment (setproctitle does): then the command's session must do.
        """
        if not self.here:
            return set()
        table = guard.process_table()
        known = {process.identity for process in table}
        found = {identity for identity in (self.guard, self.child) if identity in known}
        for root in tuple(found):
            found.update(guard.below(root.pid, table))
        for process in table:
            if process.identity.start >= self.child.start and process.identity not in found:
                environ = _environ(process.identity.pid)
                blank = not environ.strip(b"\0")
                if self.mark.encode() in environ or (blank and process.session == self.child.pid):
                    found.add(process.identity)
        running = {process.identity for process in table if process.running}
        return {identity for identity in found & running if identity.pid != os.getpid()}

    def end(self, grace_seconds: float) -> tuple[int, ...]:
        """End every process of the tree and remove the pid file; the pids that were ended.

        Raises:
            ProcessFailed: some could not be ended within the grace time and a little more; the pid file is left.
        """
        seen: set[Identity] = set()

        def find() -> Collection[Identity]:
            # One that was seen stays in view: it may lose its parents on the way.
            seen.update(self.members())
            return [identity for identity in seen if guard.is_running(identity)]

        killing = time.monotonic() + grace_seconds
        left = guard.end_all(find, lambda: killing, time.sleep, killing + KILL_SECONDS)
        if left:
            raise ProcessFailed(
                f"{self.purpose}: processes {sorted(identity.pid for identity in left)} do not end, not even by KILL",
                expected="all of it to end",
                fix="look at them with `ps -o pid,stat,wchan,cmd`: state D is a wait inside a driver, "
                "which only a reset of the device or a restart of the machine ends",
            )
        self.path.unlink(missing_ok=True)
        return tuple(sorted(identity.pid for identity in seen))


def recorded(run_dir: Path) -> list[ProcessRecord]:
    """What the pid files in a folder say, oldest first; damaged ones are left out (:func:`reap` removes them)."""
    return sorted((content.record() for content in trees(run_dir)), key=lambda record: record.started)


def trees(run_dir: Path) -> list[Saved]:
    """The content of the pid files in a folder; those that are damaged or cannot be read are left out."""
    found = []
    for path in _pid_files(run_dir):
        with suppress(OSError, *_DAMAGED):
            found.append(_load(path))
    return found


def membership(run_dir: Path) -> dict[int, ProcessRecord]:
    """Every running process of the recorded trees, by pid, with the record that it belongs to."""
    return {member.pid: content.record() for content in trees(run_dir) for member in content.members()}


def reap(run_dir: Path) -> list[Reaped]:
    """End what is recorded, is still the same process, and has no living owner; remove records of the dead.

    A record whose owner lives is never touched, nor one of another host or PID namespace (unless that host has been
    restarted since), nor a process whose creation time is not the recorded one.

    Raises:
        ProcessFailed: some process cannot be ended; the other records were dealt with all the same.
    """
    reaped: list[Reaped] = []
    failure: ProcessFailed | None = None
    for path in _pid_files(run_dir):
        try:
            saved = _load(path)
        except OSError:
            continue  # gone by now, or not to be read at the moment: nothing says that it is damaged
        except _DAMAGED:
            path.unlink(missing_ok=True)
            continue
        if not saved.is_running(saved.owner):
            record = saved.record()
            try:
                reaped.append(Reaped(record, saved.end(saved.grace)))
            except ProcessFailed as error:
                failure = failure or error
    for temporary in run_dir.glob("*.json*.tmp"):
        with suppress(FileNotFoundError):  # its writer gave it its name
            if time.time() - temporary.stat().st_mtime > _TEMPORARY_SECONDS:
                temporary.unlink()
    if failure is not None:
        raise failure
    return reaped


def _environ(pid: int) -> bytes:
    """A process's initial environment; of one that may not be read, a word that is no environment."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b"unreadable"


def _pid_files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob(f"*{SUFFIX}"))


def _load(path: Path) -> Saved:
    """A pid file's content; OSError when it cannot be read, one of :data:`_DAMAGED` when it is no record."""
    return Saved.of(path, json.loads(path.read_text()))
