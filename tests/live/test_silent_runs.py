"""The automation that ends silent runs, on a real Prefect server that others use as well."""

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Completed
from standin.waiting import wait_for

from deployments.api import connect, healthy
from deployments.automations import ensure_automations, load_automations
from deployments.catalogue import TAG, Entry
from deployments.deploy import deploy
from deployments.environment import api_url, client_environment, server_environment
from deployments.upkeep import ensure_pool
from infra.config.settings import Settings
from infra.machine.detached import Detached, start_detached
from infra.machine.host import free_port

WITHIN = timedelta(seconds=20)
FLOW = """
import time

from prefect import flow


@flow(name="waits")
def waits() -> None:
    time.sleep(600)
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path)


@pytest.fixture
def api(settings: Settings, tmp_path: Path) -> Iterator[str]:
    """A server as the stack starts it: the one that the tests share runs no automations."""
    # Between the choice of a port and its use another process may take it.
    url, server = next(filter(None, (start(settings, free_port(), tmp_path / "server.log") for _ in range(5))))
    yield url
    server.stop()


def start(settings: Settings, port: int, log: Path) -> tuple[str, Detached] | None:
    """A Prefect server that answers; None when somebody else has the port."""
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    server = start_detached(command, server_environment(settings, port), log.parent, log)
    try:
        wait_for(lambda: healthy(api_url(port)), f"an answer; {log} tells more", 300, alive=lambda: server.alive)
    except AssertionError:
        server.stop()
        if "already in use" in log.read_text():
            return None
        print(log.read_text()[-5000:])
        raise
    return api_url(port), server


def begin(client: SyncPrefectClient, name: str, tags: tuple[str, ...]) -> UUID:
    """A run of a deployment with these tags."""
    made = Entry(flow="waits", name=name, description="", parameters={}, tags=tags)
    deploy(client, [made], {made.entrypoint: {}})
    return client.create_flow_run_from_deployment(client.read_deployment_by_name(f"waits/{name}").id).id


def test_a_silent_run_of_ours_is_crashed_and_anothers_is_left_alone(
    settings: Settings, api: str, tmp_path: Path
) -> None:
    (tmp_path / "waits.py").write_text(FLOW)
    [automation] = load_automations()
    trigger = automation.trigger.model_copy(update={"within": WITHIN})
    with connect(api) as client:
        ensure_pool(client)
        ensure_automations(client, [automation.model_copy(update={"trigger": trigger})])
        ours, theirs = begin(client, "ours", (TAG, "nightly")), begin(client, "theirs", ("nightly", "eagle3-like"))
        done = begin(client, "done", (TAG,))
        processes = [_execute(settings, api, run, tmp_path) for run in (ours, theirs, done)]
        try:
            wait_for(lambda: all(_beaten(client, run) for run in (ours, theirs, done)), "all have beaten once", 300)
            client.set_flow_run_state(done, Completed(), force=True)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        wait_for(lambda: client.read_flow_run(ours).state_name == "Crashed", "ours is marked", 120)
        # They fell silent at one moment. Another one of ours that falls silent now is marked one whole bound later; by
        # then a rule that matches all runs would have marked the other, too.
        later = begin(client, "later", (TAG,))
        process = _execute(settings, api, later, tmp_path)
        try:
            wait_for(lambda: _beaten(client, later), "it has sent a heartbeat", 300)
        finally:
            process.kill()
            process.wait()
        wait_for(lambda: client.read_flow_run(later).state_name == "Crashed", "it is marked", 120)
        assert client.read_flow_run(theirs).state_name == "Running"
        assert client.read_flow_run(done).state_name == "Completed"


def _execute(settings: Settings, api: str, run: UUID, folder: Path) -> "subprocess.Popen[bytes]":
    """Execute a run as a worker would."""
    environment = client_environment(settings, api) | {
        "PREFECT__FLOW_RUN_ID": str(run),
        "PREFECT__FLOW_ENTRYPOINT": f"{folder / 'waits.py'}:waits",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PATH": os.environ["PATH"],
    }
    return subprocess.Popen([sys.executable, "-m", "prefect.engine"], env=environment, cwd=folder)


def _beaten(client: SyncPrefectClient, run: UUID) -> bool:
    wanted = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": {"id": [f"prefect.flow-run.{run}"]}}
    return bool(client._client.post("/events/filter", json={"filter": wanted}).json()["events"])
