"""Run one command, and end it with everything it started as soon as its owner is gone.

Run as ``python -I -S guard.py PURPOSE`` by ``infra.machine.processes.guarded``; standard library only, one thread only.

stdin carries one JSON line (the request, see :class:`Guard`), then any number of lines ``stop SECONDS``; its end
means that the owner is gone. stdout carries JSON lines: ``{"started": record}`` or ``{"failed": reason}``, then
``{"exit": status}`` when the command has ended (a negative status is a signal's number), then ``{"ended": true}`` when
nothing is left of what it started.

The guard is the subreaper (``man 2 PR_SET_CHILD_SUBREAPER``) of what it starts: whatever loses its parent becomes
the guard's child, in whatever session, so the tree below the guard is always all of it.
"""

import ctypes
import datetime
import json
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

MARK = "EAGLE3_GUARD_MARK"
"""Variable that the guard adds to its command's environment: what was started is found by it without the guard."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
OWNER_CHECK_SECONDS = 1.0
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 2.0


class Identity(NamedTuple):
    """A process for good: a pid may be used again, a pid with its creation time is not."""

    pid: int
    start: int
    """Creation time in clock ticks since boot."""


class PidScope(NamedTuple):
    """Where pids are given: of another place's nothing can be said, though the number may be in use here, too."""

    host: str
    boot: str
    """The machine's present run, from its start to its restart; containers have their machine's."""
    namespace: str
    """The PID namespace: ``pid:[4026531836]``."""


class Process(NamedTuple):
    """One line of the process table."""

    identity: Identity
    parent: int
    session: int
    running: bool
    """False for a zombie; a process whose first thread has ended before the others is running."""


def look_up(pid: int) -> Process | None:
    """The process that has this pid now (``man 5 proc_pid_stat``)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    running = fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
    return Process(Identity(pid, int(fields[19])), int(fields[1]), int(fields[3]), running)


def this_pid_scope() -> PidScope:
    """This process's own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return PidScope(os.uname().nodename, boot, os.readlink("/proc/self/ns/pid"))


def process_table() -> list[Process]:
    """Every process that this one can see."""
    found = (look_up(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None]


def is_running(identity: Identity) -> bool:
    """Whether this very process still runs."""
    process = look_up(identity.pid)
    return process is not None and process.identity == identity and process.running


def below(pid: int, table: Collection[Process]) -> list[Identity]:
    """The descendants of a process, itself not included."""
    children: dict[int, list[Identity]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process.identity)
    found: list[Identity] = []
    queue = [pid]
    while queue:
        members = children.pop(queue.pop(), [])
        found.extend(members)
        queue.extend(member.pid for member in members)
    return found


def send(identity: Identity, number: signal.Signals) -> None:
    """Send a signal to this very process, if it is still there and may be signalled."""
    process = look_up(identity.pid)
    if process is None or process.identity != identity:
        return
    try:
        os.kill(identity.pid, number)
    except (ProcessLookupError, PermissionError):
        return  # the caller looks again, and sees who is left


def end_all(
    find: Callable[[], Collection[Identity]],
    deadline: Callable[[], float],
    pause: Callable[[float], None],
    give_up: float = math.inf,
) -> Collection[Identity]:
    """Send TERM to all that ``find`` returns, KILL after the deadline, until it returns nothing.

    Times are ``time.monotonic()`` seconds; ``deadline`` is asked again on each pass. ``pause`` waits so many seconds,
    or less when something happens; the pauses grow once KILL was sent, since who outlives that hangs in a driver.
    Returns who was left at ``give_up``.
    """
    asked: set[Identity] = set()
    seconds = PAUSE_SECONDS
    while found := find():
        now = time.monotonic()
        if now >= give_up:
            return found
        for identity in found:
            if now >= deadline():
                send(identity, signal.SIGKILL)
            elif identity not in asked:
                asked.add(identity)
                send(identity, signal.SIGTERM)
                send(identity, signal.SIGCONT)  # a stopped process meets its TERM only when it goes on
        pause(min(seconds, give_up - now))
        if now >= deadline():
            seconds = min(2 * seconds, LONGEST_PAUSE_SECONDS)
    return []


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600 so that readers see all of it or nothing, whoever else writes it or died writing it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    if LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


LIBC = ctypes.CDLL(None, use_errno=True)
GUARD = os.getpid()


class Guard:
    """One command and all that it starts.

    The request's keys: command, env, cwd, log, pid_file, mark, owner (pid, start), grace (seconds), record (what the
    owner wants in the pid file).
    """

    def __init__(self, request: dict[str, Any], unread: bytes) -> None:
        self.request = request
        self.owner = Identity(*request["owner"])
        self.grace = float(request["grace"])
        self.pid_file = Path(request["pid_file"])
        self.child: subprocess.Popen[bytes] | None = None
        self.status: int | None = None
        self.deadline = math.inf
        self.unread = unread
        self.inputs = [0, wakeups()]

    def run(self) -> None:
        """Start the command, wait for a reason to end, end everything."""
        self.say(started=self.start())
        while self.status is None and self.deadline == math.inf:
            self.listen(OWNER_CHECK_SECONDS)
            self.reap()
        if self.status is not None and (left := self.tree()):
            self.note(f"the command has ended with status {self.status}; ending {len(left)} processes that it left")
        self.end_within(self.grace)
        end_all(self.tree, lambda: self.deadline, self.listen)
        self.pid_file.unlink(missing_ok=True)
        self.say(ended=True)

    def start(self) -> dict[str, Any]:
        """Start the command and write its pid file; the record that was written."""
        request = self.request
        try:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.dup2(log, 2)
            self.child = subprocess.Popen(  # only reap() takes its status
                request["command"],
                env=request["env"] | {MARK: request["mark"]},
                cwd=request["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a command that signals its own group does not hit the guard
                preexec_fn=die_with_guard,  # safe: this process has one thread
            )
            os.close(log)
            record: dict[str, Any] = request["record"] | {
                **this_pid_scope()._asdict(),
                "guard": identity_of(os.getpid()),
                "child": identity_of(self.child.pid),
                "owner": self.owner,
                "mark": request["mark"],
                "grace": self.grace,
                "log": request["log"],
                "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
            write_private(self.pid_file, json.dumps(record))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.fail(f"{type(error).__name__}: {error}")
        return record

    def fail(self, reason: str) -> NoReturn:
        """Leave nothing, say why the command could not be started, and exit."""
        end_all(self.tree, lambda: 0.0, self.listen)
        self.say(failed=reason)
        raise SystemExit(1)

    def tree(self) -> list[Identity]:
        """All that the command has started, and the command."""
        self.reap()
        return below(os.getpid(), process_table())

    def reap(self) -> None:
        """Take the exit status of every child that has ended: the command's own, and orphans' that came here."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.child is not None and pid == self.child.pid:
                self.status = self.child.returncode = os.waitstatus_to_exitcode(status)
                self.say(exit=self.status)

    def listen(self, seconds: float) -> None:
        """Wait at most so long for a signal or a line of the owner's, and take note of a request to end."""
        ready, _, _ = select.select(self.inputs, [], [], seconds)
        for source in ready:
            data = os.read(source, 65536)
            if source == 0:
                self.hear(data)
            elif set(data) - {signal.SIGCHLD}:
                self.end_within(self.grace)
        if self.deadline == math.inf and not is_running(self.owner):
            # A process that the owner forked may hold the pipe open.
            self.note("the owner is gone; ending everything")
            self.end_within(self.grace)

    def hear(self, data: bytes) -> None:
        """Act on what came through the pipe; nothing means that the owner's end is closed."""
        if not data:
            self.inputs.remove(0)
            if self.deadline == math.inf:
                self.note("the owner is gone; ending everything")
            self.end_within(self.grace)
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            verb, _, seconds = line.partition(b" ")
            if verb == b"stop":
                self.end_within(float(seconds))

    def end_within(self, seconds: float) -> None:
        """Set the time of KILL, unless it is sooner already."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def note(self, text: str) -> None:
        """Leave a line in the command's log."""
        try:
            os.write(2, f"[guard {os.getpid()}] {text}\n".encode())
        except OSError:
            return  # a full disk must not keep the guard from its work

    def say(self, **message: Any) -> None:
        """Tell the owner, if there is one."""
        try:
            os.write(1, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            return


def identity_of(pid: int) -> Identity:
    """The identity of a process that is there: this one, or a child not yet waited for."""
    process = look_up(pid)
    if process is None:
        raise ProcessLookupError(f"process {pid} is not in /proc")
    return process.identity


def die_with_guard() -> None:
    """In the command's process, before it runs: a guard that is killed takes its command with it."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != GUARD:
        os._exit(1)  # the guard was killed before the line above


def wakeups() -> int:
    """A descriptor from which the numbers of arriving signals can be read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)
    return reader


def read_request() -> tuple[dict[str, Any], bytes]:
    """The owner's first line, and what came with it."""
    data = b""
    while b"\n" not in data:
        piece = os.read(0, 65536)
        if not piece:
            raise SystemExit("guard: the owner was gone before it had asked for anything")
        data += piece
    line, _, unread = data.partition(b"\n")
    return json.loads(line), unread


def main() -> None:
    """Serve one owner."""
    # What the owner's thread had blocked or ignored would be blocked or ignored in the command too.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    Guard(*read_request()).run()


if __name__ == "__main__":
    main()
