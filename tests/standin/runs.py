"""Runs of the flow eagle3 that a test can kill, and what is left of them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from standin.machine import REPOSITORY

from deployments.processes import find

POLL_SECONDS = 0.02


class Zygote:
    """Runs flows, one at a time, as forks of a process that has everything imported (``standin.zygote``).

    Args:
        folder: working folder of the process, and its Prefect home.
        api: URL of the Prefect server.
    """

    def __init__(self, folder: Path, api: str) -> None:
        environment = {
            **os.environ,
            "PREFECT_API_URL": api,
            "PREFECT_HOME": str(folder / "prefect"),
            "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests"))),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "standin.zygote"], cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def start(self, fields: dict[str, Any], environment: dict[str, str], log: Path) -> int:
        """Start a run of the round with these fields; its pid."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"round": fields, "environment": environment, "log": str(log)}) + "\n")
        self._process.stdin.flush()
        return self._said()

    def status(self) -> int:
        """The run's exit status, once it has ended."""
        return self._said()

    def close(self) -> None:
        """End it, and a run that is under way."""
        self._process.kill()
        self._process.communicate()

    def _said(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


def wait_for(condition: Callable[[], Any], what: str, limit: float, alive: Callable[[], bool] = lambda: True) -> Any:
    """The condition's value once it holds, within ``limit`` seconds; ``alive`` says whether it still can."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert alive() or condition(), f"the run ended before: {what}"
        assert time.monotonic() < deadline, f"not within {limit:.0f} s: {what}"
        time.sleep(POLL_SECONDS)
    return value


def more(count: Callable[[], int], by: int) -> Callable[[], bool]:
    """True once ``count`` has grown by ``by``."""
    first = count()
    return lambda: count() >= first + by


def living(state_dir: Path) -> list[int]:
    """Processes whose environment names this state folder, whoever their parent is."""
    return [process.pid for process in find("EAGLE3_STATE_DIR", str(state_dir))]


def runs(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    with suppress(OSError):
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    return False
