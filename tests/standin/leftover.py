"""Processes for tests of cleaning up: a leftover of a killed run, and a bystander."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from standin.processes import running
from standin.waiting import wait_for

from infra.machine.processes.guarded import clean_environment

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable, "-I", "-S", "-c")
SLEEP = ("/bin/sleep", "600")  # any user may run it

OWNER = """
import json, sys, time
from pathlib import Path
from infra.machine.processes.guarded import Guarded, Spec, clean_environment
run_dir, *command = sys.argv[1:]
guarded = Guarded.start(Spec(tuple(command), "vllm-generate", Path(run_dir).parent / "log", clean_environment({}),
    grace_seconds=0.3), Path(run_dir))
print(guarded.guard_pid, flush=True)
time.sleep(600)
"""

ENGINE = """
import os, signal, socket, subprocess, sys, time
def start(code, **options):
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code], **options)
wait = "import time; time.sleep(600)"
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
# A group whose leader and member ignore TERM.
leader = start(deaf + "import subprocess, sys;"
    f"p = subprocess.Popen([sys.executable, '-I', '-S', '-c', {deaf + wait!r}]);"
    "print(p.pid, flush=True);" + wait, process_group=0, stdout=subprocess.PIPE)
member = int(leader.stdout.readline())
# One that listens on a port.
holder = start("import socket; s = socket.create_server(('127.0.0.1', 0));"
    "print(s.getsockname()[1], flush=True);" + wait,
    stdout=subprocess.PIPE)
port = int(holder.stdout.readline())
# One whose parent has ended.
between = start(f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-I', '-S', '-c', {wait!r}],"
    "start_new_session=True, stdout=2).pid)", stdout=subprocess.PIPE)
orphan = int(between.communicate()[0])
# One that is defunct: ended, and its parent, which sleeps, never asks.
mother = start("import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'pass']);"
    "os.waitid(os.P_PID, p.pid, os.WEXITED | os.WNOWAIT); print(p.pid, flush=True);" + wait,
    stdout=subprocess.PIPE)
defunct = int(mother.stdout.readline())
with open(sys.argv[1] + ".new", "w") as file:
    print(leader.pid, member, holder.pid, orphan, mother.pid, defunct, port, file=file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
"""An engine with every kind of child; writes their pids and the port to the file that it is given."""


class Leftover:
    """What a killed run left: its owner and its guard are dead, the children of its engine are not.

    Attributes:
        leader, member: a process group that ignores TERM.
        holder: listens on ``port``.
        orphan: its parent had ended already.
        mother: the parent of ``defunct``, which is a zombie.
    """

    def __init__(self, run_dir: Path, *, owner_dies: bool = True) -> None:
        file = run_dir.parent / "tree"
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(run_dir), *PYTHON, ENGINE, str(file)],
            cwd=REPOSITORY,
            env=clean_environment({"PYTHONPATH": str(REPOSITORY)}),
            stdout=subprocess.PIPE,
        )
        assert self.owner.stdout is not None
        self.guard = int(self.owner.stdout.readline())
        wait_for(file.exists, "the engine's children run")
        found = list(map(int, file.read_text().split()))
        self.leader, self.member, self.holder, self.orphan, self.mother, self.defunct, self.port = found
        if owner_dies:
            self.owner.send_signal(signal.SIGSTOP)  # so that it does not react to the end of its guard
            os.kill(self.guard, signal.SIGKILL)
            self.owner.kill()
            self.owner.wait()

    @property
    def pids(self) -> list[int]:
        """All that run."""
        return [self.leader, self.member, self.holder, self.orphan, self.mother]

    def end(self) -> None:
        """Leave nothing of it, whatever the test did."""
        if self.owner.poll() is None:
            self.owner.kill()
            self.owner.wait()
        assert self.owner.stdout is not None
        self.owner.stdout.close()
        for pid in self.pids:
            if running(pid):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def bystander(**options: Any) -> Iterator[int]:
    """A process of its own group that has nothing to do with anything; ended afterwards."""
    process = subprocess.Popen(SLEEP, process_group=0, **options)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextmanager
def zombie() -> Iterator[int]:
    """A defunct child of this process."""
    process = subprocess.Popen([*PYTHON, "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        yield process.pid
    finally:
        process.wait()
