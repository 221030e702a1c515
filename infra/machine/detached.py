"""Processes that outlive the command that started them: who they are, and ending them with all they started."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infra.errors import ProcessFailed
from infra.machine.processes import guard
from infra.machine.processes.guard import Identity
from infra.machine.processes.records import KILL_SECONDS

# Popen's destructor complains about a child that still runs, which is what detached ones are for.
_children_of_this_command: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Detached:
    """A process of one boot, as a file remembers it; a later one with the same number is another process."""

    pid: int
    started: str
    """Boot id and creation time in clock ticks since boot: ``<boot>:<ticks>``."""

    @classmethod
    def of(cls, pid: int) -> "Detached":
        """The process that has this number now.

        Raises:
            ProcessFailed: there is none.
        """
        process = guard.look_up(pid)
        if process is None or not process.running:
            raise ProcessFailed(f"process {pid} ended at once", fix="read its log")
        return cls(pid, f"{guard.this_pid_scope().boot}:{process.identity.start}")

    @property
    def alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        return self._identity is not None and guard.is_running(self._identity)

    def stop(self, grace_seconds: float = 10.0) -> None:
        """End it and everything it started: TERM to it alone, which ends its own; KILL to what is left after the grace.

        Raises:
            ProcessFailed: some of it cannot be ended.
        """
        root, seen = self._identity, set[Identity]()
        if root is None or not guard.is_running(root):
            return

        def left() -> list[Identity]:
            # One that was seen stays in view: it may lose its parents on the way.
            if guard.is_running(root):
                seen.update((root, *guard.below(root.pid, guard.process_table())))
            return [identity for identity in seen if guard.is_running(identity)]

        left()
        guard.send(root, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while left() and time.monotonic() < deadline:
            time.sleep(0.05)
        survivors = guard.end_all(left, lambda: deadline, time.sleep, max(deadline, time.monotonic()) + KILL_SECONDS)
        if survivors:
            pids = sorted(identity.pid for identity in survivors)
            raise ProcessFailed(f"processes {pids} do not end, not even by KILL", fix="look at them with `ps`")

    @property
    def _identity(self) -> Identity | None:
        """None when it is of another boot."""
        boot, _, start = self.started.rpartition(":")
        return Identity(self.pid, int(start)) if boot == guard.this_pid_scope().boot and start.isdigit() else None


def this_process() -> Detached:
    """This very process."""
    return Detached.of(os.getpid())


def start_detached(command: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> Detached:
    """Start a process that lives on when this one ends; its output is appended to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children_of_this_command.append(child)
    return Detached.of(child.pid)


def find(variable: str, value: str, words: Sequence[str] = ()) -> list[Detached]:
    """The processes whose environment has this variable, and whose command has these words in a row."""
    command, setting = "\0".join(("", *words, "")).encode(), f"\0{variable}={value}\0".encode()
    found = []
    for process in guard.process_table():
        entry = Path(f"/proc/{process.identity.pid}")
        with suppress(OSError, ProcessFailed):  # it is gone, or somebody else's
            if setting in b"\0" + (entry / "environ").read_bytes() and (
                not words or command in b"\0" + (entry / "cmdline").read_bytes()
            ):
                found.append(Detached.of(process.identity.pid))
    return found
