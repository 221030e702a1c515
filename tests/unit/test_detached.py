"""Processes that outlive their command."""

import os
import sys
from pathlib import Path

import pytest
from standin.waiting import wait_for

from infra.errors import ProcessFailed
from infra.machine.detached import Detached, start_detached, this_process

CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: open("termed", "w").close())
open("ready", "w").close()
while True:
    time.sleep(0.05)
"""
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {CHILD!r}]).wait()"


def test_only_the_process_itself_is_asked_and_what_it_leaves_is_killed(tmp_path: Path) -> None:
    process = start_detached(
        [sys.executable, "-S", "-c", PARENT], dict(os.environ), tmp_path, tmp_path / "logs" / "log"
    )
    wait_for((tmp_path / "ready").exists, "the child runs")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    child = Detached.of(int(children[0]))
    process.stop(grace_seconds=0.5)
    assert [process.alive, child.alive] == [False, False]
    assert not (tmp_path / "termed").exists(), "a server ends its own; nobody else's TERM reaches them"
    process.stop()
    with pytest.raises(ProcessFailed, match="ended at once"):
        Detached.of(process.pid)


def test_a_remembered_process_is_known_again() -> None:
    mine = this_process()
    boot, _, ticks = mine.started.rpartition(":")
    assert mine.alive
    assert mine == Detached.of(os.getpid())
    for other in (f"{boot}:{int(ticks) - 1}", f"another-boot:{ticks}", "", boot, f"{boot}:soon"):
        assert not Detached(mine.pid, other).alive, other
