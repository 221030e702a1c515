"""A flow whose run the server has given up notices it; the flow is a process of its own, as a worker starts it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Crashed
from standin.machine import REPOSITORY
from standin.waiting import wait_for

from deployments.api import connect

FLOW = """
import sys
import time
from pathlib import Path

from prefect import flow

from infra.engines.client.pool import run_ordered
from tasks import presence

presence.LOOK_SECONDS, presence.SLEPT_SECONDS = 0.3, 2.0
folder = Path(sys.argv[1])


@flow(name="long", persist_result=False)
def long() -> None:
    from prefect.runtime import flow_run

    with presence.ends_with_its_run():
        (folder / "run").write_text(flow_run.id)
        (folder / "run").rename(folder / "began")
        try:
            while not (folder / "done").exists():
                for _ in run_ordered([0], lambda _: time.sleep(0.2), 1, 1):
                    pass
        finally:
            (folder / "ended").touch()


long()
"""


@pytest.fixture
def client(api: str) -> Iterator[SyncPrefectClient]:
    with connect(api) as client:
        yield client


class Running:
    """The flow in a process of its own, once it is in the middle of its work."""

    def __init__(self, api: str, folder: Path) -> None:
        (folder / "long.py").write_text(FLOW)
        self.folder, self.log = folder, folder / "log"
        environment = os.environ | {"PREFECT_API_URL": api, "PYTHONPATH": str(REPOSITORY)}
        with self.log.open("wb") as log:
            command = [sys.executable, "long.py", str(folder)]
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        wait_for((folder / "began").exists, "the flow begins", alive=lambda: self.process.poll() is None)
        self.run = UUID((folder / "began").read_text())

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.fixture
def running(api: str, tmp_path: Path) -> Iterator[Running]:
    running = Running(api, tmp_path)
    yield running
    running.process.kill()
    running.process.wait()


def test_a_run_that_the_server_gave_up_ends_and_says_so(running: Running, client: SyncPrefectClient) -> None:
    client.set_flow_run_state(running.run, Crashed(message="No heartbeat for 90 seconds"), force=True)
    wait_for(lambda: running.process.poll() is not None, "the flow ends")
    assert (running.folder / "ended").exists(), "its own clean-up ran"
    assert "this run is Crashed on the server (No heartbeat for 90 seconds): it stops here" in running.said
    state = client.read_flow_run(running.run).state
    assert state is not None
    assert (state.name, state.message) == ("Crashed", "No heartbeat for 90 seconds")


def test_a_run_that_slept_says_so_and_goes_on(running: Running, client: SyncPrefectClient) -> None:
    running.process.send_signal(signal.SIGSTOP)
    time.sleep(3.5)  # the sleep itself
    running.process.send_signal(signal.SIGCONT)
    wait_for(lambda: "this run stood still for" in running.said, "it notices")
    (running.folder / "done").touch()
    assert running.process.wait(120) == 0
    assert client.read_flow_run(running.run).state_name == "Completed"
    assert "it stops here" not in running.said


def test_a_run_that_slept_until_it_was_given_up_ends(running: Running, client: SyncPrefectClient) -> None:
    running.process.send_signal(signal.SIGSTOP)
    client.set_flow_run_state(running.run, Crashed(message="No heartbeat for 90 seconds"), force=True)
    running.process.send_signal(signal.SIGCONT)
    wait_for(lambda: running.process.poll() is not None, "the flow ends")
    assert (running.folder / "ended").exists()
    assert client.read_flow_run(running.run).state_name == "Crashed"
