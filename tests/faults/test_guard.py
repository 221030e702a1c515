"""Real processes and real signals: what is started through a guard ends when it must, and nothing else does."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from standin.processes import running
from standin.waiting import LIMIT_SECONDS, wait_for

from infra.errors import ProcessFailed
from infra.machine.processes import guard
from infra.machine.processes.guard import Identity
from infra.machine.processes.guarded import GUARD_LOST, Guarded, Spec, clean_environment, reap, recorded
from infra.machine.processes.namespaces import whole_table_visible

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable, "-I", "-S", "-c")
SLEEP = (*PYTHON, "import time; time.sleep(600)")

HELD = """
import os, sys, time
while not os.path.exists(sys.argv[-1]):
    time.sleep(0.01)
"""
"""Begins a command that goes on when the file is there that is its last argument."""

TREE = """
import os, signal, subprocess, sys, time
def start(code, **options):
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code], **options)
wait = "import time; time.sleep(600)"
ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
own_session = start(wait, start_new_session=True)
deaf = start(ignore + wait, stdout=subprocess.PIPE)
deaf.stdout.readline()
stopped = start(wait)
os.kill(stopped.pid, signal.SIGSTOP)
# An orphan in a session of its own: its parent ends at once.
between = start(
    "import os, subprocess, sys;"
    f"command = [sys.executable, '-I', '-S', '-c', {wait!r}];"
    "print(subprocess.Popen(command, start_new_session=True, stdout=2).pid)",
    stdout=subprocess.PIPE)
orphan = int(between.communicate()[0])
with open(sys.argv[1] + ".new", "w") as file:
    print(own_session.pid, deaf.pid, stopped.pid, orphan, file=file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
"""A command with every kind of descendant; writes their pids to the file that it is given."""

OWNER = """
import json, os, sys, time
from pathlib import Path
from infra.machine.processes.guarded import Guarded, Spec, clean_environment
run_dir, fork, *commands = json.loads(sys.argv[1])
started = [Guarded.start(Spec(tuple(command), f"test {number}", Path(run_dir).parent / f"log{number}",
    clean_environment({}), grace_seconds=0.5), Path(run_dir)) for number, command in enumerate(commands)]
if fork and os.fork() == 0:
    time.sleep(600)
print(json.dumps([[guarded.guard_pid, guarded.pid] for guarded in started]), flush=True)
time.sleep(600)
"""
"""An owner in a process of its own; prints the pids of its guards and commands."""


def all_end(processes: list[psutil.Process]) -> None:
    wait_for(lambda: not any(map(running, processes)), f"{processes} end")


class Place:
    """A folder for pid files and logs, and everything that a test starts (ended after it, pass or fail)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.go_on = folder / "go-on"
        self.watched: list[psutil.Process] = []

    def spec(self, *command: str, grace: float = 0.5) -> Spec:
        return Spec(command, "test", self.folder / "log", clean_environment({}), grace_seconds=grace)

    def start(self, *command: str, grace: float = 0.5) -> Guarded:
        guarded = Guarded.start(self.spec(*command, grace=grace), self.run_dir)
        self.watch(guarded.guard_pid, guarded.pid)
        return guarded

    def start_held(self, code: str) -> Guarded:
        """A command that does nothing until the file ``go_on`` is made: what it is then can be seen before it ends."""
        return self.start(*PYTHON, HELD + code, str(self.go_on))

    def watch(self, *pids: int) -> list[psutil.Process]:
        found = [psutil.Process(pid) for pid in pids]
        self.watched += found
        return found

    def tree(self, file: Path) -> list[psutil.Process]:
        """The descendants that a TREE command has written down."""
        wait_for(file.exists, "the tree is there")
        return self.watch(*map(int, file.read_text().split()))

    def start_tree(self, grace: float = 0.5) -> tuple[Guarded, list[psutil.Process]]:
        file = self.folder / "tree"
        guarded = self.start(*PYTHON, TREE, str(file), grace=grace)
        return guarded, [*self.watch(guarded.pid), *self.tree(file)]

    def owner(
        self, *commands: tuple[str, ...], fork: bool = False, prefix: tuple[str, ...] = (), watch: bool = True
    ) -> tuple[psutil.Popen, list[list[int]]]:
        """Another owner; its process, and the pids (guard, command) of each command.

        ``prefix`` is a command to start it with; without ``watch`` the pids may be those of another namespace.
        """
        owner = psutil.Popen(
            [*prefix, sys.executable, "-c", OWNER, json.dumps([str(self.run_dir), fork, *commands])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            env=clean_environment({"PYTHONPATH": str(ROOT)}),
        )
        self.watched.append(owner)
        pids = json.loads(owner.stdout.readline())
        if watch:
            self.watch(*(pid for pair in pids for pid in pair), *(child.pid for child in owner.children()))
        return owner, pids

    def bystander(self) -> psutil.Process:
        process = psutil.Popen(SLEEP)
        self.watched.append(process)
        return process


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for process in place.watched:
        if running(process):
            process.kill()
        if isinstance(process, psutil.Popen):
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("pass", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_exit_status_is_exact_and_stays(place: Place, code: str, status: int) -> None:
    guarded = place.start_held(code)
    place.go_on.touch()
    assert guarded.wait(LIMIT_SECONDS) == status
    all_end(place.watched)
    assert guarded.poll() == status
    guarded.stop()
    assert guarded.poll() == status
    assert recorded(place.run_dir) == []


def test_a_command_that_ends_takes_what_it_left_with_it(place: Place) -> None:
    file = place.folder / "tree"
    ends = TREE.replace("time.sleep(600)\n", f"{HELD}sys.exit(5)\n")
    guarded = place.start(*PYTHON, ends, str(file), str(place.go_on))
    left = place.tree(file)
    place.go_on.touch()
    assert guarded.wait(LIMIT_SECONDS) == 5
    all_end([*left, *place.watched])
    assert "ending 4 processes that it left" in (place.folder / "log").read_text()


def test_an_orphan_that_ends_is_reaped_while_the_command_runs(place: Place) -> None:
    guarded, tree = place.start_tree()
    orphan = tree[-1]
    assert orphan.ppid() == guarded.guard_pid
    orphan.kill()
    wait_for(lambda: not psutil.pid_exists(orphan.pid), "not even a zombie is left")
    assert guarded.poll() is None
    guarded.stop()


def test_output_is_appended_to_the_log_and_the_environment_is_complete(place: Place) -> None:
    (place.folder / "log").write_text("before\n")
    code = "import os, sys; print(os.environ.get('A'), os.environ.get('HOME'), flush=True); sys.stderr.write('err\\n')"
    spec = Spec((*PYTHON, code), "test", place.folder / "log", {"A": "1"}, cwd=place.folder)
    with Guarded.start(spec, place.run_dir) as guarded:
        assert guarded.wait(LIMIT_SECONDS) == 0
    assert (place.folder / "log").read_text() == "before\n1 None\nerr\n"


def test_a_command_inherits_no_pipe_and_no_ignored_signal(place: Place) -> None:
    code = (
        "import os, signal; print(sorted(os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')),"
        "[signal.getsignal(n) == signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)],"
        "signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with place.start(*SLEEP), place.start_held(code) as guarded:
            place.go_on.touch()
            assert guarded.wait(LIMIT_SECONDS) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # 0, 1, 2 and the one that lists the folder
    assert (place.folder / "log").read_text().splitlines()[0] == "['0', '1', '2'] 4 [True, True, True] set()"


def test_a_command_that_is_not_there_is_named(place: Place) -> None:
    with pytest.raises(ProcessFailed, match="no-such-command"):
        Guarded.start(place.spec("no-such-command"), place.run_dir)
    assert list(place.run_dir.iterdir()) == []


def test_a_missing_log_folder_is_named(place: Place) -> None:
    spec = Spec(SLEEP, "test", place.folder / "missing" / "log", {})
    with pytest.raises(ProcessFailed, match="missing/log"):
        Guarded.start(spec, place.run_dir)
    assert list(place.run_dir.iterdir()) == []


def test_the_pid_file_says_who_runs_and_no_secret(place: Place) -> None:
    spec = Spec((*SLEEP, "--api-key", "s3cret", "--tokenizer", "here"), "say It", place.folder / "log", {"B": "s3cret"})
    with Guarded.start(spec, place.run_dir) as guarded:
        (record,) = recorded(place.run_dir)
        assert (record.guard_pid, record.child_pid, record.owner_pid) == (guarded.guard_pid, guarded.pid, os.getpid())
        assert (record.purpose, record.alive, record.owner_alive) == ("say It", True, True)
        assert record.command[-4:] == ("--api-key", "***", "--tokenizer", "here")
        assert record.path.stat().st_mode & 0o777 == 0o600
        assert "s3cret" not in record.path.read_text()
    assert list(place.run_dir.iterdir()) == []


def test_a_thread_that_ends_does_not_end_what_it_started(place: Place) -> None:
    found: list[Guarded] = []
    thread = threading.Thread(target=lambda: found.append(place.start(*SLEEP)))
    thread.start()
    thread.join()
    (guarded,) = found
    assert guarded.wait(0.5) is None
    guarded.stop()
    assert guarded.poll() == -signal.SIGTERM


def test_stop_ends_the_whole_tree(place: Place) -> None:
    bystander = place.bystander()
    guarded, tree = place.start_tree()
    guarded.stop()
    assert not any(map(running, tree))
    assert guarded.poll() == -signal.SIGTERM
    assert running(bystander)
    guarded.stop()


def test_a_command_gets_its_grace_time(place: Place) -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(7)));"
        "print('ready', flush=True); time.sleep(600)"
    )
    guarded = place.start(*PYTHON, code, grace=30)
    wait_for(lambda: "ready" in (place.folder / "log").read_text(), "the handler is set")
    guarded.stop()
    assert guarded.poll() == 7


def test_a_second_stop_may_be_sooner_and_both_return(place: Place) -> None:
    guarded, tree = place.start_tree(grace=300)
    first = threading.Thread(target=guarded.stop)
    first.start()
    wait_for(lambda: guarded.poll() is not None, "the first stop has sent TERM")
    assert any(map(running, tree))
    guarded.stop(grace_seconds=0)
    first.join(LIMIT_SECONDS)
    assert not first.is_alive()
    assert not any(map(running, tree))


def test_a_guard_that_is_stopped_does_not_stop_stop(place: Place) -> None:
    guarded, tree = place.start_tree()
    os.kill(guarded.guard_pid, signal.SIGSTOP)
    guarded.stop()
    assert not any(map(running, [*tree, *place.watched]))
    assert recorded(place.run_dir) == []


def test_a_process_forked_from_the_owner_does_not_stop_it(place: Place) -> None:
    guarded = place.start(*SLEEP)
    pid = os.fork()
    if pid == 0:
        guarded.stop()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert guarded.wait(0.3) is None
    guarded.stop()


def test_all_end_when_the_owner_is_killed(place: Place) -> None:
    bystander = place.bystander()
    mine = place.start(*SLEEP)
    file = place.folder / "tree"
    owner, pids = place.owner((*PYTHON, TREE, str(file)), SLEEP)
    tree = place.tree(file)
    assert len(recorded(place.run_dir)) == 3
    watched = place.watch(*(pid for pair in pids for pid in pair))
    owner.kill()
    all_end([*watched, *tree])
    wait_for(lambda: len(recorded(place.run_dir)) == 1, "the pid files are removed")
    assert running(bystander)
    assert mine.poll() is None
    mine.stop()


def test_all_end_though_a_fork_of_the_owner_holds_the_pipe(place: Place) -> None:
    owner, ((guard, command),) = place.owner(SLEEP, fork=True)
    (fork,) = [child for child in owner.children() if child.pid != guard]
    watched = place.watch(guard, command)
    owner.kill()
    all_end(watched)
    assert running(fork)


def test_all_end_when_the_owner_just_exits(place: Place) -> None:
    owner, ((guard, command),) = place.owner(SLEEP)
    watched = place.watch(guard, command)
    owner.send_signal(signal.SIGINT)
    all_end(watched)


def test_an_owner_under_a_guard_takes_its_own_commands_along(place: Place) -> None:
    file = place.folder / "tree"
    inner = [str(place.run_dir), False, [*PYTHON, TREE, str(file)]]
    spec = Spec(
        (sys.executable, "-c", OWNER, json.dumps(inner)),
        "outer",
        place.folder / "log",
        clean_environment({"PYTHONPATH": str(ROOT)}),
        grace_seconds=0.2,
    )
    outer = Guarded.start(spec, place.run_dir)
    tree = [*place.watch(outer.pid), *place.tree(file)]
    wait_for(lambda: len(recorded(place.run_dir)) == 2, "both pid files are there")
    outer.stop()
    assert not any(map(running, tree))


def test_a_killed_guard_is_noticed_and_stop_ends_the_tree(place: Place) -> None:
    bystander = place.bystander()
    guarded, tree = place.start_tree()
    os.kill(guarded.guard_pid, signal.SIGKILL)
    assert guarded.wait(LIMIT_SECONDS) == GUARD_LOST
    all_end(tree[:1])  # the command goes with its guard
    assert all(map(running, tree[1:]))
    guarded.stop()
    assert not any(map(running, tree))
    assert running(bystander)
    assert recorded(place.run_dir) == []


def test_who_outlives_kill_is_looked_at_ever_less_often() -> None:
    """As a process that waits inside a driver, until the machine is restarted."""
    hanging = Identity(0, 0)  # nobody's, so that no signal reaches anybody
    now, pauses = 0.0, list[float]()

    def pause(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard.time, "monotonic", lambda: now)
        assert guard.end_all(lambda: [hanging], lambda: 1.0, pause, give_up=60.0) == [hanging]
    before = [seconds for number, seconds in enumerate(pauses) if sum(pauses[:number]) < 1.0]
    assert set(before) == {0.05}
    assert max(pauses) == 2.0
    assert len(pauses) - len(before) < 40, "it was 20 times a second"
    assert sum(pauses) == pytest.approx(60.0)


def test_reap_ends_what_a_killed_guard_and_a_killed_owner_left(place: Place) -> None:
    bystander = place.bystander()
    mine = place.start(*SLEEP)
    file = place.folder / "tree"
    owner, ((guard, command),) = place.owner((*PYTHON, TREE, str(file)))
    tree = place.tree(file)
    os.kill(owner.pid, signal.SIGSTOP)  # so that it does not outlive its guard by reacting
    os.kill(guard, signal.SIGKILL)
    assert reap(place.run_dir) == []
    assert all(map(running, tree))
    owner.kill()
    owner.wait()
    (reaped,) = reap(place.run_dir)
    assert (reaped.record.guard_pid, reaped.record.child_pid) == (guard, command)
    assert set(reaped.ended) == {process.pid for process in tree}
    assert not any(map(running, tree))
    assert running(bystander)
    assert mine.poll() is None
    assert [record.child_pid for record in recorded(place.run_dir)] == [mine.pid]
    assert reap(place.run_dir) == []
    mine.stop()


def test_an_orphan_that_hides_its_environment_is_known_by_its_session(place: Place) -> None:
    """As a program that sets its title: the memory that showed its environment is overwritten."""
    code = (
        "import os, subprocess, sys, time; p = subprocess.Popen([sys.executable, '-I', '-S', '-c',"
        "'import time; time.sleep(600)'], env={}); print(p.pid, flush=True); time.sleep(600)"
    )
    guarded = place.start(*PYTHON, code)
    (orphan,) = place.watch(
        int(wait_for(lambda: (place.folder / "log").read_text().strip(), "the orphan says its pid"))
    )
    os.kill(guarded.guard_pid, signal.SIGKILL)
    assert guarded.wait(LIMIT_SECONDS) == GUARD_LOST
    guarded.stop()
    assert not running(orphan)


def forge(place: Place, process: psutil.Process, **changes: Any) -> Path:
    """The record of a real command, rewritten to point at another process under a dead owner."""
    with place.start(*SLEEP):
        (record,) = recorded(place.run_dir)
        data = json.loads(record.path.read_text())
    start = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    data |= {
        "owner": [data["child"][0], data["child"][1]],
        "guard": [process.pid, start],
        "child": [process.pid, start],
    }
    data |= {"mark": "0" * 32} | {key: change(data[key]) for key, change in changes.items()}
    path = place.run_dir / "forged.pid.json"
    path.write_text(json.dumps(data))
    return path


def test_a_forged_record_of_the_same_process_is_acted_on(place: Place) -> None:
    """Shows that the tests below fail to end their bystander for the reason that they name."""
    bystander = place.bystander()
    path = forge(place, bystander)
    (reaped,) = reap(place.run_dir)
    assert reaped.ended == (bystander.pid,)
    assert not running(bystander)
    assert not path.exists()


def earlier(identity: list[int]) -> list[int]:
    return [identity[0], identity[1] - 1]


@pytest.mark.parametrize("changes", [{"guard": earlier, "child": earlier}, {"boot": lambda boot: boot[::-1]}])
def test_a_pid_that_was_used_again_is_not_touched(place: Place, changes: dict[str, Any]) -> None:
    bystander = place.bystander()
    path = forge(place, bystander, **changes)
    (record,) = recorded(place.run_dir)
    assert not record.alive
    assert not record.owner_alive
    (reaped,) = reap(place.run_dir)
    assert reaped.ended == ()
    assert running(bystander)
    assert not path.exists()


def test_another_name_of_the_host_makes_it_no_other_machine(place: Place) -> None:
    """A container that shares the machine's pids has a host name of its own."""
    leftover = place.bystander()
    forge(place, leftover, host=lambda host: f"not-{host}", owner=lambda _: [os.getpid(), 1])
    (reaped,) = reap(place.run_dir)
    assert reaped.ended == (leftover.pid,)


@pytest.mark.skipif(not whole_table_visible() or os.geteuid() != 0, reason="only the machine's root sees every process")
def test_a_record_of_a_container_that_is_gone_is_removed(place: Place) -> None:
    bystander = place.bystander()
    path = forge(place, bystander, namespace=lambda _: "pid:[1]")
    (reaped,) = reap(place.run_dir)
    assert reaped.ended == ()
    assert running(bystander)
    assert not path.exists()


def test_a_record_of_another_host_is_left_alone(place: Place) -> None:
    bystander = place.bystander()
    path = forge(place, bystander, host=lambda host: f"not-{host}", boot=lambda boot: boot[::-1])
    (record,) = recorded(place.run_dir)
    assert record.alive
    assert record.owner_alive
    assert reap(place.run_dir) == []
    assert running(bystander)
    assert path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a PID namespace")
def test_a_live_round_in_a_container_is_not_ended_from_its_host(place: Place) -> None:
    """Its pids are others here, so that its owner looks dead, and the mark in its command's environment is in sight."""
    owner, _ = place.owner(SLEEP, prefix=("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"), watch=False)
    inside = owner.children(recursive=True)
    place.watched += inside
    (command,) = [process for process in inside if process.cmdline() == list(SLEEP)]
    assert reap(place.run_dir) == []
    assert running(command)
    assert len(recorded(place.run_dir)) == 1


def test_an_owners_pid_that_was_used_again_is_a_dead_owner(place: Place) -> None:
    bystander = place.bystander()
    forge(place, bystander, owner=lambda _: [os.getpid(), 1])
    (reaped,) = reap(place.run_dir)
    assert reaped.ended == (bystander.pid,)


def test_a_damaged_pid_file_is_removed(place: Place) -> None:
    place.run_dir.mkdir()
    (place.run_dir / "test.pid.json").write_text("")
    assert recorded(place.run_dir) == []
    assert reap(place.run_dir) == []
    assert list(place.run_dir.iterdir()) == []


def test_a_pid_file_that_cannot_be_read_stays(place: Place) -> None:
    place.run_dir.mkdir()
    path = place.run_dir / "test.pid.json"
    path.symlink_to(path.name)  # reading it fails with ELOOP; a network's file system has ESTALE and EIO
    assert recorded(place.run_dir) == []
    assert reap(place.run_dir) == []
    assert path.is_symlink()


def test_a_folder_that_is_not_there_holds_no_records(place: Place) -> None:
    assert recorded(place.run_dir) == []
    assert reap(place.run_dir) == []


def test_a_clean_environment_leaves_out_what_a_child_must_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = {
        "PREFECT_API_URL": "http://127.0.0.1/api",
        "PYTHONPATH": "/x",
        "VIRTUAL_ENV": "/venv",
        "HF_TOKEN": "s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "OPENAI_API_KEY": "s",
        "DB_URL": "postgres://me:s@host/db",
    }
    kept = {"HOME": "/home/me", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "0", "AWS_REGION": "eu"}
    for name, value in (dropped | kept | {"PATH": "/venv/bin:/usr/bin"}).items():
        monkeypatch.setenv(name, value)
    environment = clean_environment({"HF_TOKEN": "wanted", "NEW": "1"})
    assert environment["HF_TOKEN"] == "wanted"
    assert environment["NEW"] == "1"
    assert environment["PATH"] == "/usr/bin"
    assert not (dropped.keys() - {"HF_TOKEN"}) & environment.keys()
    assert {name: environment[name] for name in kept} == kept
