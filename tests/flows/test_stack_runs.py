"""What the command line does to the runs and schedules of a real Prefect server; workers are stand-ins."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, get_run_logger, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Running
from standin.waiting import wait_for

from deployments import upkeep
from deployments.api import LIVE, connect, runs
from deployments.catalogue import Entry
from deployments.cli import follow as follow_command
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


class Followed:
    """``eagle3 round`` on this server, with a run that is Running."""

    def __init__(self, client: SyncPrefectClient, api: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.run, self.said = begin(client, "followed"), list[str]()
        self.on_say: Callable[[str], None] = lambda _text: None

        @contextmanager
        def borrowed(*_: Any) -> Iterator[str]:
            yield api
            self.said.append("stack ended")

        def say(text: str) -> None:
            self.said.append(text)
            self.on_say(text)

        patch.setenv("EAGLE3_STATE_DIR", str(folder / "state"))
        patch.setattr("deployments.stack.borrowed", borrowed)
        patch.setattr(round_command, "_fetching", lambda *_: nullcontext(lambda: None))
        patch.setattr(round_command, "build_environments", lambda *_: None)
        patch.setattr(round_command, "create_run", lambda *_: self.run)
        patch.setattr(round_command, "say", say)
        patch.setattr(follow_command, "say", say)
        patch.setattr(follow_command, "POLL_SECONDS", 0.0)


@pytest.fixture
def followed(client: SyncPrefectClient, api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Followed:
    return Followed(client, api, tmp_path, monkeypatch)


def test_a_round_is_followed_through_a_busy_servers_silence(
    followed: Followed, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, failures = follow_command.state_of, iter([True, True])

    def busy(client: SyncPrefectClient, run: UUID) -> tuple[str, bool]:
        if next(failures, False):
            raise ProcessFailed("the Prefect server does not answer")
        return real(client, run)

    def complete(text: str) -> None:
        if "waited for" in text:
            client.set_flow_run_state(followed.run.id, Completed(), force=True)

    followed.on_say = complete
    monkeypatch.setattr(follow_command, "state_of", busy)
    monkeypatch.setenv("EAGLE3_API_PORT", "4444")
    round_command.run_round("tiny")
    *_, waiting, stack, ended = followed.said
    assert waiting == f"the Prefect server does not answer: run {followed.run.id} is waited for"
    assert stack == "stack ended"
    assert f"run {followed.run.name} ended Completed" in ended
    assert f"http://127.0.0.1:4444/runs/flow-run/{followed.run.id}" in capsys.readouterr().out


def test_a_round_whose_server_is_lost_ends(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_client: SyncPrefectClient, _run: UUID) -> tuple[str, bool]:
        raise ProcessFailed("the Prefect server does not answer")

    monkeypatch.setattr(follow_command, "state_of", lost)
    monkeypatch.setattr(follow_command, "SILENT_SECONDS", 0.0)
    with pytest.raises(ProcessFailed, match="does not answer"):
        round_command.run_round("tiny")


def test_ctrl_c_cancels_the_run(followed: Followed, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    real = round_command.state_of

    def interrupted(_client: SyncPrefectClient, _run: UUID) -> tuple[str, bool]:
        raise KeyboardInterrupt

    def worked(client: SyncPrefectClient, run: UUID) -> tuple[str, bool]:
        """The worker ends what is being cancelled."""
        found = real(client, run)
        if found[0] == "Cancelling":
            client.set_flow_run_state(run, Cancelled(), force=True)
        return found

    monkeypatch.setattr(follow_command, "state_of", interrupted)
    monkeypatch.setattr(round_command, "state_of", worked)
    with pytest.raises(KeyboardInterrupt):
        round_command.run_round("tiny")
    assert f"run {followed.run.id} is Cancelled" in followed.said


def test_a_line_a_step_with_its_progress_and_what_is_warned_of(
    api: str, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, shown, looks = list[str](), list[str](), list[Any]()
    monkeypatch.setattr(follow_command, "say", said.append)
    monkeypatch.setattr(follow_command, "show", shown.append)

    @task(task_run_name="a part")
    def part() -> None:
        pass

    @task(task_run_name="first")
    def first() -> None:
        get_run_logger().info("3 of 8, 5 s left\nand more")
        part()
        wait_for(lambda: looks[0].update(client) or any("5 s left" in text for text in shown), "progress", 60)

    @task(task_run_name="second")
    def second() -> None:
        get_run_logger().warning("it is warm")
        raise ValueError("too warm")

    @flow(name="stepwise")
    def stepwise() -> None:
        looks.append(follow_command._Shown(UUID(flow_run.id)))
        first()
        second(return_state=True)

    with temporary_settings({PREFECT_API_URL: api}):
        stepwise(return_state=True)
    wait_for(lambda: looks[0].update(client) or {"it is warm", "ValueError: too warm"} <= set(said), "it is told", 60)
    assert next(text.partition(" (")[0] for text in shown if "left" in text) == "first: 3 of 8, 5 s left"
    assert [text.partition(":")[0] for text in said if text.startswith(("first", "a part", "second"))] == [
        "first",
        "second",
    ]
    assert not any("Traceback" in text for text in said)
