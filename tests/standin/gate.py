"""Holds the real trainer at a step of the test's choice."""

import shlex
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("gated_trainer.py")


class Gate:
    """A stop in a training: the trainer waits after so many steps, their metrics written, until the gate is opened.

    A signal reaches the trainer while it waits, as it does between any two steps.

    Args:
        folder: gets two small files.
        steps: steps of the whole training that are made then, those of earlier attempts included.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._opened = folder / f"opened-{steps}"
        self.python = folder / f"python-{steps}"
        command = shlex.join([sys.executable, "-P", str(SCRIPT), str(steps), str(self._opened)])
        self.python.write_text(
            f'#!/bin/sh\nshift 2  # -m and the module that the script runs itself\nexec {command} "$@"\n'
        )
        self.python.chmod(0o700)

    def open(self) -> None:
        """Let the trainer go on, for good."""
        self._opened.touch()
