"""Long-running processes that cannot outlive their owner.

Everything long-running is started through :meth:`Guarded.start`: a small guard process (``guard.py``) starts the
command, and ends the command's whole tree when the owner stops it, exits, or is killed. A pid file in ``run_dir`` says
who runs; :func:`reap` ends what is left when both an owner and its guard were killed.
"""

import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from infra.errors import ProcessFailed
from infra.machine.host import cpu_count
from infra.machine.processes import guard
from infra.machine.processes.records import KILL_SECONDS, SUFFIX, ProcessRecord, Reaped, Saved, reap, recorded
from infra.machine.processes.scrub import clean_environment, shown

__all__ = [
    "GUARD_LOST",
    "Guarded",
    "ProcessRecord",
    "Reaped",
    "Spec",
    "clean_environment",
    "forward_environment",
    "reap",
    "recorded"
]  # fmt: skip

GUARD_LOST = -9
"""Exit status reported when the guard was killed: the command is killed with it."""

_START_SECONDS = 60.0
_WAKE_SECONDS = 0.5
_REPOSITORY = Path(__file__).resolve().parents[3]


def forward_environment() -> dict[str, str]:
    """For a module of this project that runs a few forward passes of a model in a process of its own."""
    return {
        "PYTHONPATH": str(_REPOSITORY),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cpu_count())),
        "HF_HUB_OFFLINE": "1",
        # They are not worth compiling, and would need a C++ compiler that torch gets along with.
        "TORCH_COMPILE_DISABLE": "1",
    }


@dataclass(frozen=True)
class Spec:
    """What to run."""

    command: tuple[str, ...]
    purpose: str
    """A few words for people: ``"vllm generate"``."""
    log: Path
    """File to which the command's stdout and stderr are appended; its folder must exist."""
    env: Mapping[str, str]
    """The command's complete environment (one variable, ``EAGLE3_GUARD_MARK``, is added to it)."""
    cwd: Path | None = None
    """Working folder; None means this process's own."""
    grace_seconds: float = 10.0
    """Time from TERM to KILL when the owner dies, or for what the command leaves behind when it ends by itself."""


class Guarded:
    """A command that runs under a guard of this process; safe to use from any thread.

    As a context manager it ends the tree on the way out. A process forked from the owner may look, not stop.
    """

    def __init__(self, spec: Spec, process: subprocess.Popen[bytes], pid_file: Path) -> None:
        self.spec = spec
        self._owner_pid = os.getpid()
        self._process = process
        self._pid_file = pid_file
        self._lock = threading.Lock()
        self._saved: Saved | None = None
        self._failure = ""
        self._status: int | None = None
        self._clean = False
        self._answered = threading.Event()
        self._exited = threading.Event()
        self._over = threading.Event()
        threading.Thread(target=self._listen, name=f"guard of {spec.purpose}", daemon=True).start()

    @classmethod
    def start(cls, spec: Spec, run_dir: Path) -> Self:
        """Start a command under a guard; returns when the command has been started.

        Raises:
            ProcessFailed: it could not be started (no such command, no folder for the log ...); nothing is left.
        """
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark = secrets.token_hex(16)
        slug = re.sub(r"[^a-z0-9]+", "-", spec.purpose.lower()).strip("-") or "process"
        pid_file = run_dir.resolve() / f"{slug}-{mark[:8]}{SUFFIX}"
        owner = guard.identity_of(os.getpid())
        request = {
            "command": spec.command,
            "env": dict(spec.env),
            "cwd": str((spec.cwd or Path()).absolute()),
            "log": str(spec.log.absolute()),
            "pid_file": str(pid_file),
            "mark": mark,
            "owner": owner,
            "grace": spec.grace_seconds,
            "record": {"purpose": spec.purpose, "command": shown(spec.command)},
        }
        # Both pipes are close-on-exec here, so no other child of this process holds them.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, spec.purpose],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )
        started = cls(spec, process, pid_file)
        started._send(json.dumps(request).encode() + b"\n")
        started._confirm()
        return started

    @property
    def pid(self) -> int:
        """The command's pid."""
        return self._record.child.pid

    @property
    def guard_pid(self) -> int:
        """The guard's pid."""
        return self._process.pid

    def poll(self) -> int | None:
        """The command's exit status (negative: the signal that ended it), None while it runs.

        When the guard was killed the command's own status is unknown, and :data:`GUARD_LOST` is returned;
        :meth:`stop` then ends what is left.
        """
        if self._status is None and self._over.is_set():
            return GUARD_LOST
        return self._status

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the command's own end, at most ``timeout`` seconds; as :meth:`poll`.

        What the command leaves behind is ended by the guard after that; :meth:`stop` waits for it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        # In short waits: an exception that another thread throws in comes through between them, not within one.
        while not self._exited.is_set() and (deadline is None or time.monotonic() < deadline):
            self._exited.wait(_WAKE_SECONDS if deadline is None else min(_WAKE_SECONDS, deadline - time.monotonic()))
        return self.poll()

    def stop(self, grace_seconds: float | None = None) -> None:
        """End the command and all it started: TERM, then KILL after ``grace_seconds`` (None: the spec's own).

        Returns when nothing is left, within the grace time and about 5 seconds; does nothing when all has ended.

        Raises:
            ProcessFailed: some process cannot be ended (it hangs in a driver, say).
        """
        if os.getpid() != self._owner_pid:
            return
        grace = self.spec.grace_seconds if grace_seconds is None else grace_seconds
        self._send(f"stop {grace}\n".encode())
        over = self._over.wait(grace + KILL_SECONDS)
        if not self._clean:
            with self._lock:  # a guard that is still there hangs or was stopped: no second grace time
                self._record.end(grace if over else 0.0)
            self._over.wait(KILL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _record(self) -> Saved:
        if self._saved is None:
            raise ProcessFailed(f"{self.spec.purpose} was not started")
        return self._saved

    def _send(self, data: bytes) -> None:
        """Write to the guard, which may be gone."""
        stream = self._process.stdin
        with self._lock:
            if stream is None or stream.closed:
                return
            try:
                while data:
                    data = data[stream.write(data) :]
            except BrokenPipeError:
                return  # _listen sees the guard's end

    def _confirm(self) -> None:
        """Wait for the guard's first answer."""
        if not self._answered.wait(_START_SECONDS):
            self._process.kill()
            raise ProcessFailed(f"{self.spec.purpose}: its guard gave no answer in {_START_SECONDS:.0f} s")
        if self._saved is None:
            self._over.wait(KILL_SECONDS)
            raise ProcessFailed(
                f"{self.spec.purpose} could not be started as {self.spec.command[0]!r}: {self._failure}",
                expected=f"a command that can be run, and a folder for its log {self.spec.log}",
            )

    def _listen(self) -> None:
        """Take in what the guard says until it ends (a thread of its own)."""
        stream = self._process.stdout
        assert stream is not None
        for line in iter(stream.readline, b""):
            self._hear(line)
        self._process.wait()
        stream.close()
        with self._lock:
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._over.set()
        self._exited.set()
        self._answered.set()

    def _hear(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            self._failure += line.decode(errors="replace")  # the guard's own traceback
            return
        if "started" in message:
            self._saved = Saved.of(self._pid_file, message["started"])
            self._answered.set()
        elif "failed" in message:
            self._failure = message["failed"]
            self._answered.set()
        elif "exit" in message:
            self._status = message["exit"]
            self._exited.set()
        elif "ended" in message:
            self._clean = True
