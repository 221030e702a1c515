"""A flow that is ended in the middle of a step wakes at once, whatever it waits for, and leaves nothing running."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from standin.machine import Machine
from standin.processes import living
from standin.runs import Zygote
from standin.waiting import wait_for

ANSWER_SECONDS = 600
"""The engine's for one request: whoever waited for it would wait for long."""
END_SECONDS = 25.0
"""Prefect kills a cancelled flow after 30 s."""


@pytest.fixture(scope="module")
def zygote(api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    started = Zygote(tmp_path_factory.mktemp("zygote"), api)
    yield started
    started.close()


@pytest.mark.parametrize(("step", "kind"), [("hidden", "extract"), ("answers", "complete")])
def test_a_step_that_waits_for_its_engine_ends_at_once(
    step: str, kind: str, finished: Machine, zygote: Zygote, tmp_path: Path
) -> None:
    machine = finished.copy(tmp_path)
    made = machine.folder / "state" / "store" / "rounds" / machine.fields["name"]
    for later in (step, "samples", "draft", "eval", "report", "published"):
        shutil.rmtree(made / later, ignore_errors=True)
    log = tmp_path / "flow.log"
    flow = zygote.start(machine.fields, machine.environment | {"STANDIN_DELAY": str(ANSWER_SECONDS)}, log)
    wait_for(lambda: machine.requests(kind), "the engine is asked")
    begin = time.monotonic()
    os.kill(flow, signal.SIGTERM)
    assert zygote.status() == -signal.SIGTERM
    assert time.monotonic() - begin < END_SECONDS
    wait_for(lambda: living(machine.folder / "state") == [], "its engine is gone")
    said = log.read_text(errors="replace")
    assert "CancelledError" not in said
    assert "Exception in thread" not in said
