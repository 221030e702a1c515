"""Runs of the flow eagle3 that a test can kill."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from standin.machine import REPOSITORY


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
