"""Processes that outlive the command that started them: who they are, and ending them with all they started."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.errors import ProcessFailed

# Popen's destructor complains about a child that still runs, which is what detached ones are for.
_children_of_this_command: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Process:
    """One process of this boot; a later one with the same number is another process."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that has this number now.

        Raises:
            ProcessFailed: there is none.
        """
        started = _started(pid)
        if started is None:
            raise ProcessFailed(f"process {pid} ended at once", fix="read its log")
        return cls(pid, started)

    @property
    def alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        return _started(self.pid) == self.started

    def stop(self, grace_seconds: float = 10.0) -> None:
        """End it and everything it started: TERM to it, then KILL to whatever is left after ``grace_seconds``."""
        if not self.alive:
            return
        root = psutil.Process(self.pid)
        tree = [root, *root.children(recursive=True)]
        root.terminate()
        deadline = time.monotonic() + grace_seconds
        while _living(tree) and time.monotonic() < deadline:
            tree += [child for child in _children(root) if child not in tree]
            time.sleep(0.05)
        for survivor in _living(tree):
            survivor.kill()
        psutil.wait_procs(tree, timeout=5)


def start_detached(command: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> Process:
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
    return Process.of(child.pid)


def find(variable: str, value: str, words: Sequence[str] = ()) -> list[Process]:
    """The processes whose environment has this variable, and whose command has these words in a row."""
    command, setting = "\0".join(("", *words, "")).encode(), f"\0{variable}={value}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ProcessFailed):  # it is gone, or somebody else's
            if (
                entry.name.isdigit()
                and setting in b"\0" + (entry / "environ").read_bytes()
                and (not words or command in b"\0" + (entry / "cmdline").read_bytes())
            ):
                found.append(Process.of(int(entry.name)))
    return found


def port_holder(port: int) -> str:
    """Who listens on a TCP port of this machine, for a message: ``pid 12 (python -m http.server)``."""
    for connection in psutil.net_connections(kind="tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        if listens and connection.pid:
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                command = "?"
            return f"pid {connection.pid} ({command[:120]})"
    return "a process of another user"


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, for a message."""
    if not log.is_file():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _children(root: psutil.Process) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = root.children(recursive=True)
        return children
    except psutil.NoSuchProcess:
        return []


def _living(tree: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [item for item in tree if _runs(item)]


def _runs(item: psutil.Process) -> bool:
    try:
        return bool(item.is_running() and item.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _started(pid: int) -> str | None:
    """Boot id and start tick of a process; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()
    if state in "ZX":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{rest[18]}"


def current() -> Process:
    """This very process."""
    return Process.of(os.getpid())
