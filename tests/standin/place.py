"""Inside a flow's process: tells the journal where the flow stands, and ends it by SIGKILL where a test wants it.

A touch is the opening, renaming, linking, making, listing or removing of something below the machine's folder; what
lies between two of them changes nothing that lasts. ``STANDIN_FALL=STEP:NUMBER`` ends the process just before that
touch of the step, or at the step's end if it has fewer.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from standin.instead import instead_of_vllm

from infra.round.ledger import Ledger, Step

TOUCHES = frozenset(
    {"open", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "os.truncate"}
)
LAST = "cleanup after"
"""The ledger's last step; what comes after it is called ``report`` here."""


class Place:
    """The step that the flow is at, and the touches in it.

    Args:
        folder: where touches count.
        journal: file that gets ``{"step": name}`` at a step's begin and ``{"left": name, "touches": n}`` at its end.
        fall: where to end the process, as in ``STANDIN_FALL``; empty: nowhere.
    """

    def __init__(self, folder: str, journal: str, fall: str) -> None:
        self._folder = folder
        # Opened once: the notes are no touches.
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._fatal, _, number = fall.rpartition(":")
        self._number = int(number or 0)
        self._step, self._touches = "", 0

    def enter(self, step: str) -> None:
        """The flow begins a step."""
        self._step, self._touches = step, 0
        self._note({"step": step, "pid": os.getpid()})

    def leave(self) -> None:
        """The flow has ended the step."""
        if self._step == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self._note({"left": self._step, "touches": self._touches})

    def touch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook."""
        if event in TOUCHES and arguments and str(arguments[0]).startswith(self._folder):
            self._touches += 1
            if self._step == self._fatal and self._touches == self._number:
                os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, event: dict[str, Any]) -> None:
        os.write(self._journal, json.dumps(event).encode() + b"\n")


def install() -> Place:
    """Put the stand-in in vLLM's place, let retries come at once, and follow the flow of this process."""
    instead_of_vllm(pytest.MonkeyPatch())  # for as long as the process lives
    folder = os.path.dirname(os.environ["EAGLE3_STATE_DIR"])
    place = Place(folder, os.environ["STANDIN_JOURNAL"], os.environ.get("STANDIN_FALL", ""))
    step = Ledger.step

    @contextmanager
    def followed(ledger: Ledger, name: str, key: str = "") -> Iterator[Step]:
        place.enter(name)
        with step(ledger, name, key) as made:
            yield made
        place.leave()
        if name == LAST:
            place.enter("report")

    patch.object(Ledger, "step", followed).start()
    sys.addaudithook(place.touch)
    return place
