"""What the command line does to the runs and schedules of a real Prefect server; workers and watchers are stand-ins."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.states import Cancelled, Completed, Running

from deployments import upkeep
from deployments.api import LIVE, connect, runs
from deployments.catalogue import Entry
from deployments.cli import round as round_command
from deployments.deploy import deploy
from deployments.environment import POOL
from infra.errors import ProcessFailed


@flow(name="theirs")
def theirs() -> None:
    pass


@pytest.fixture
def client(api: str) -> Iterator[SyncPrefectClient]:
    with connect(api) as client:
        upkeep.ensure_pool(client)
        yield client


def entry(name: str, cron: str | None = None) -> Entry:
    return Entry(flow="ours", name=name, description="", parameters={}, tags=(), cron=cron)


def deploy_again(client: SyncPrefectClient, *entries: Entry) -> None:
    deploy(client, entries, {item.entrypoint: {} for item in entries})


def begin(client: SyncPrefectClient, name: str, running: bool = True) -> FlowRun:
    """A run of deployment ``ours/NAME``, held by a worker or still in the queue."""
    deploy_again(client, entry(name))
    run = client.create_flow_run_from_deployment(client.read_deployment_by_name(f"ours/{name}").id)
    if running:
        client.set_flow_run_state(run.id, Running(), force=True)
    return run


def state(client: SyncPrefectClient, run: FlowRun) -> str | None:
    return client.read_flow_run(run.id).state_name


def test_schedules_of_a_deployment_that_exists_stay_the_users(client: SyncPrefectClient) -> None:
    def schedules(name: str) -> list[Any]:
        found = client.read_deployment_by_name(f"ours/{name}").schedules
        kept = {"schedule", "active", "slug", "parameters"}
        return sorted((item.model_dump(include=kept) for item in found), key=lambda item: str(item["slug"]))

    both = entry("kept", "0 3 * * *"), entry("bare", "0 3 * * *"), entry("plain")
    deploy_again(client, *both)
    [nightly] = schedules("kept")
    assert (nightly["slug"], nightly["active"], nightly["schedule"]["cron"]) == ("nightly", False, "0 3 * * *")
    deployment, bare, plain = (client.read_deployment_by_name(f"ours/{name}") for name in ("kept", "bare", "plain"))
    client.update_deployment_schedule(
        deployment.id, deployment.schedules[0].id, active=True, schedule=CronSchedule(cron="30 1 * * *", timezone="UTC")
    )
    own = DeploymentScheduleCreate(
        schedule=IntervalSchedule(interval=timedelta(hours=5)), active=False, slug="mine", parameters={"x": 1}
    )
    client.create_deployment_schedules(deployment.id, [own])
    client.create_deployment_schedules(plain.id, [own])
    client.delete_deployment_schedule(bare.id, bare.schedules[0].id)
    before = schedules("kept"), schedules("plain")
    assert len(before[0]) == 2

    deploy_again(client, *both)
    assert (schedules("kept"), schedules("plain")) == before
    assert schedules("bare") == [], "a schedule that was deleted does not come back"


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What ``deployments`` logged."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("deployments.")]


def test_cancelling_all_lets_no_queued_run_begin(
    client: SyncPrefectClient, api: str, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first, queued, own = begin(client, "first"), begin(client, "queued", False), client.create_flow_run(theirs)
    client.set_flow_run_state(own.id, Running(), force=True)

    def work(_seconds: float) -> None:
        """The worker: ends what is being cancelled, then takes up what it is given."""
        for run in runs(client, ["CANCELLING"], pool=POOL):
            client.set_flow_run_state(run.id, Cancelled(), force=True)
        for item in client.get_scheduled_flow_runs_for_work_pool(POOL, scheduled_before=datetime.now(UTC)):
            client.set_flow_run_state(item.flow_run.id, Running(), force=True)

    caplog.set_level(logging.INFO, "deployments")
    monkeypatch.setattr(upkeep, "time", SimpleNamespace(monotonic=time.monotonic, sleep=work))
    upkeep.cancel_all(api)
    assert (state(client, first), state(client, own)) == ("Cancelled", "Running")
    assert state(client, queued) in ("Scheduled", "Late")
    assert told(caplog) == [
        f"cancelling run {first.name}",
        "1 runs wait in the queue; they start with the next `eagle3 up`",
    ]

    upkeep.ensure_pool(client)
    work(0)
    assert state(client, queued) == "Running", "the next `eagle3 up` gives it to its worker"
    client.set_flow_run_state(queued.id, Completed(), force=True)
    client.set_flow_run_state(own.id, Completed(), force=True)


def test_a_run_of_another_nodes_worker_is_left_to_it(
    client: SyncPrefectClient, caplog: pytest.LogCaptureFixture
) -> None:
    run = begin(client, "elsewhere")
    other = {"work_pool_name": POOL, "name": "second-node"}
    beat = {"name": other["name"]}
    client.request("POST", "/work_pools/{work_pool_name}/workers/heartbeat", path_params=other, json=beat)
    caplog.set_level(logging.INFO, "deployments")
    upkeep.settle(client)
    assert state(client, run) == "Running"
    assert told(caplog) == [f"run {run.name} is left to second-node"]
    client.request("DELETE", "/work_pools/{work_pool_name}/workers/{name}", path_params=other)
    upkeep.settle(client)
    assert state(client, run) == "Crashed"


def test_only_runs_of_our_workers_are_settled(client: SyncPrefectClient, caplog: pytest.LogCaptureFixture) -> None:
    left, own = begin(client, "left"), client.create_flow_run(theirs)
    client.set_flow_run_state(own.id, Running(), force=True)
    caplog.set_level(logging.INFO, "deployments")
    upkeep.settle(client)
    assert (state(client, left), state(client, own)) == ("Crashed", "Running")
    assert told(caplog) == [f"run {left.name} had been left Running by an earlier worker: now Crashed"]
    assert own.id in {run.id for run in runs(client, LIVE)}, "`eagle3 status` lists it all the same"
    client.set_flow_run_state(own.id, Completed(), force=True)


class Watched:
    """``eagle3 round`` on this server, with a watcher that names the run and ends with status 3."""

    def __init__(self, client: SyncPrefectClient, api: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.run, self.said = begin(client, "watched"), list[str]()
        self.on_say: Callable[[str], None] = lambda _text: None
        watcher = folder / "python"
        watcher.write_text(f"#!/bin/sh\necho '  UUID: {self.run.id}'\nexit 3\n")
        watcher.chmod(0o755)

        @contextmanager
        def borrowed(*_: Any) -> Iterator[str]:
            yield api
            self.said.append("stack ended")

        def say(text: str) -> None:
            self.said.append(text)
            self.on_say(text)

        patch.setenv("EAGLE3_STATE_DIR", str(folder / "state"))
        patch.setattr("deployments.stack.borrowed", borrowed)
        patch.setattr(round_command, "build_environments", lambda *_: None)
        patch.setattr(round_command, "say", say)
        patch.setattr(round_command, "POLL_SECONDS", 0.0)
        patch.setattr(round_command, "sys", SimpleNamespace(executable=str(watcher), stderr=sys.stderr))


@pytest.fixture
def watched(client: SyncPrefectClient, api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(client, api, tmp_path, monkeypatch)


def test_a_round_outlives_its_watcher(
    watched: Watched, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, failures = round_command._state, iter([True])

    def busy(api: str, run_id: str) -> tuple[str, bool]:
        if next(failures, False):
            raise ProcessFailed("the Prefect server does not answer")
        return real(api, run_id)

    def complete(text: str) -> None:
        if "waited for" in text:
            client.set_flow_run_state(watched.run.id, Completed(), force=True)

    watched.on_say = complete
    monkeypatch.setattr(round_command, "_state", busy)
    monkeypatch.setenv("EAGLE3_API_PORT", "4444")
    round_command.run_round("tiny")
    waiting, ended = watched.said[-3], watched.said[-1]
    assert "ended with exit status 3, and run" in waiting
    assert watched.said[-2] == "stack ended"
    assert f"run {watched.run.id} ended Completed" in ended
    assert f"http://127.0.0.1:4444/runs/flow-run/{watched.run.id}" in capsys.readouterr().out


def test_a_round_whose_server_is_lost_ends(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_api: str, _run: str) -> tuple[str, bool]:
        raise ProcessFailed("the Prefect server does not answer")

    monkeypatch.setattr(round_command, "_state", lost)
    monkeypatch.setattr(round_command, "SILENT_SECONDS", 0.0)
    with pytest.raises(ProcessFailed, match="does not answer"):
        round_command.run_round("tiny")


def test_ctrl_c_cancels_a_run_that_lost_its_watcher(
    watched: Watched, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = round_command._state

    def interrupt(text: str) -> None:
        if "waited for" in text:
            raise KeyboardInterrupt

    def worked(api: str, run_id: str) -> tuple[str, bool]:
        """The worker ends what is being cancelled."""
        found = real(api, run_id)
        if found[0] == "Cancelling":
            client.set_flow_run_state(watched.run.id, Cancelled(), force=True)
        return found

    watched.on_say = interrupt
    monkeypatch.setattr(round_command, "_state", worked)
    with pytest.raises(KeyboardInterrupt):
        round_command.run_round("tiny")
    assert watched.said[-1] == f"run {watched.run.id} is Cancelled"
