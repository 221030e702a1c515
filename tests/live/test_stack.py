"""`eagle3 up`, `down`, `round` with a real Prefect server and worker, and a stand-in for the flow."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
from standin.processes import living
from standin.waiting import wait_for
from typer.testing import CliRunner

from deployments.cli.app import app
from infra.config.load import ROUNDS
from infra.machine.detached import find
from infra.machine.host import free_port, port_in_use

CODE = Path(__file__).resolve().parents[2]
PROFILES = 'active = "mine"\n\n[profiles.mine]\nPREFECT_API_URL = "http://192.0.2.1/api"\n'
FLOW = '''
import os
import time
from pathlib import Path
from typing import Any

from infra.config.round import RoundConfig
from prefect import flow
from prefect.runtime import flow_run

NOTES = Path(os.environ["STAND_IN"])


@flow(name="eagle3")
def eagle3(config: RoundConfig, overrides: dict[str, Any] = {}) -> None:
    """Stand-in: waits while the file `hold` exists."""
    (NOTES / f"began-{flow_run.id}").write_text(f"{os.getcwd()} {config.train.epochs} {overrides}")
    try:
        while (NOTES / "hold").exists():
            time.sleep(0.05)
    finally:
        (NOTES / f"ended-{flow_run.id}").touch()
'''
TAG = "eagle3"
"""Of every run of this project's deployments."""
EMPTY = """
from prefect import flow


@flow(name="{name}")
def {name}({parameters}) -> None:
    pass
"""


@dataclass
class UserMachine:
    """A user's machine: home, checkout with stand-in flows, state folder, free port."""

    base: Path
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        flows = self.base / "checkout" / "flows"
        for folder in (flows, self.rounds, self.notes, self.profiles.parent):
            folder.mkdir(parents=True)
        self.profiles.write_text(PROFILES)
        (flows / "eagle3.py").write_text(FLOW)
        (flows / "reextract.py").write_text(EMPTY.format(name="reextract", parameters="rounds: list[str] = []"))
        (flows / "cleanup.py").write_text(EMPTY.format(name="cleanup", parameters="dry_run: bool = True"))
        both = "config: dict, extracting: dict, serving: dict, samples: int = 8, overrides: dict = {}"
        (flows / "parity.py").write_text(EMPTY.format(name="parity", parameters=both))
        tiny = (ROUNDS / "tiny.yaml").read_text()
        (self.rounds / "tiny.yaml").write_text(tiny.replace("fetch: true", "fetch: false"))

    @property
    def state_dir(self) -> Path:
        return self.base / "state"

    @property
    def rounds(self) -> Path:
        return self.base / "checkout" / "deployments" / "rounds"

    @property
    def notes(self) -> Path:
        return self.base / "notes"

    @property
    def hold(self) -> Path:
        return self.notes / "hold"

    @property
    def profiles(self) -> Path:
        return self.base / "home" / ".prefect" / "profiles.toml"

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def shell(self) -> dict[str, str]:
        """Environment of a fresh shell of this user."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "EAGLE3_"))}
        return kept | {"HOME": str(self.base / "home"), "PYTHONPATH": str(CODE), "COLUMNS": "200", "DO_NOT_TRACK": "1"}

    @property
    def env(self) -> dict[str, str]:
        environment = {f"EAGLE3_ENV_{name}": sys.prefix for name in ("FLOWS", "VLLM_CPU")}
        return (
            self.shell
            | environment
            | {
                "EAGLE3_STATE_DIR": str(self.state_dir),
                "EAGLE3_CACHE_DIR": str(self.base / "cache"),
                "EAGLE3_API_PORT": str(self.port),
                "EAGLE3_ROOT": str(self.base / "checkout"),
                "STAND_IN": str(self.notes),
            }
        )

    def told(self, *arguments: str) -> Any:
        """The facts of ``eagle3 ARGUMENTS --json``, run in this process: for commands that only ask and tell."""
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name not in self.env]:
                patch.delenv(name)
            for name, value in self.env.items():
                patch.setenv(name, value)
            patch.chdir(self.base)
            done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """``eagle3 ARGUMENTS`` in a process of its own."""
        command = [sys.executable, "-m", "deployments.cli", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.env, cwd=self.base, text=True, stdout=pipe, stderr=pipe)

    def eagle3(self, *arguments: str, status: int = 0) -> str:
        """Standard output of ``eagle3 ARGUMENTS`` (its standard error, if a failure is expected)."""
        process = self.start(*arguments)
        try:
            output, errors = process.communicate(timeout=600)
        finally:
            process.kill()
        assert process.returncode == status, f"eagle3 {arguments} -> {process.returncode}\n{output}\n{errors}"
        return errors if status else output

    def prefect(self, *arguments: str, **more: str) -> str:
        """Output of ``prefect ARGUMENTS`` in a fresh shell."""
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            env=self.shell | more,
            cwd=self.base / "checkout",
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """The server's answer; it says 503 while its database is locked, and Prefect's own clients ask again, too."""

        def answer() -> httpx.Response | None:
            response = httpx.request(method, f"{self.api}/{path}", json=body, timeout=60)
            return None if response.status_code == 503 else response

        return wait_for(answer, f"{method} {path} is answered").raise_for_status()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.ask("POST", path, body).json()

    def begin(self) -> str:
        """Start eagle3/tiny; the run's id."""
        run: str = self.told("run", "tiny")["run"]
        return run

    def worker(self) -> int:
        """Pid of the worker that `eagle3 up` started."""
        pid: int = self.told("status")["stack"]["worker"]["pid"]
        return pid

    def beat(self, run: str) -> None:
        """Send the heartbeat that the run's process sends."""
        resource = {"prefect.resource.id": f"prefect.flow-run.{run}"}
        now = datetime.now(UTC).isoformat()
        tag = {"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}
        name = "prefect.flow-run.heartbeat"
        event = {"event": name, "resource": resource, "related": [tag], "occurred": now, "id": str(uuid4())}
        self.ask("POST", "events", [event])

    def state(self, run: str) -> str:
        name: str = self.ask("GET", f"flow_runs/{run}").json()["state"]["name"]
        return name

    def deployments(self) -> dict[str, dict[str, Any]]:
        facts = (
            "version",
            "description",
            "tags",
            "parameters",
            "entrypoint",
            "work_pool_name",
            "pull_steps",
            "path",
            "global_concurrency_limit",
            "concurrency_options",
            "parameter_openapi_schema",
            "enforce_parameter_schema",
            "paused",
            "job_variables",
        )
        result = {}
        for item in self.post("deployments/filter", {}):
            limit = item["global_concurrency_limit"]
            item["global_concurrency_limit"] = limit and limit["limit"]
            item["parameter_openapi_schema"].pop("title", None)
            schedules = [(s["active"], s["schedule"], s["slug"]) for s in item["schedules"]]
            result[item["entrypoint"]] = {name: item[name] for name in facts} | {"schedules": schedules}
        return result


def last_state(machine: UserMachine, run: str) -> str:
    """The run's state as the stopped server's database has it."""
    with closing(sqlite3.connect(machine.state_dir / "prefect" / "prefect.db")) as database:
        [[name]] = database.execute("select state_name from flow_run where id = ?", [run])
    return str(name)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> UserMachine:
    return UserMachine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def up(machine: UserMachine) -> Iterator[UserMachine]:
    machine.eagle3("up")
    yield machine
    machine.hold.unlink(missing_ok=True)
    machine.eagle3("down")


def test_up_again_changes_nothing(up: UserMachine) -> None:
    before = up.told("status")["stack"]
    again = json.loads(up.eagle3("up", "--json"))
    assert (again["server_pid"], again["worker_pid"]) == (before["server"]["pid"], before["worker"]["pid"])
    assert len(up.post("automations/filter", {})) == 1
    assert [limit["limit"] for limit in up.post("v2/concurrency_limits/filter", {}) if limit["name"] == "gpu"] == [1]


def test_a_plain_prefect_in_a_fresh_shell_finds_it(up: UserMachine) -> None:
    output = up.prefect("deployment", "run", "eagle3/tiny", "--watch", "--param", 'overrides={"train.epochs": 2}')
    assert "finished successfully" in output
    [note] = up.notes.glob("began-*")
    assert note.read_text() == f"{up.base / 'checkout'} 5 {{'train.epochs': 2}}"


def test_a_second_start_waits_until_the_first_has_ended(up: UserMachine) -> None:
    up.hold.touch()
    first = up.begin()
    wait_for((up.notes / f"began-{first}").exists, "the first begins")
    second = up.begin()
    wait_for(lambda: up.state(second) == "AwaitingConcurrencySlot", "the second waits")
    listed = {run["id"]: run["state"] for run in up.told("status")["runs"]}
    assert listed[first] == "Running"
    assert listed[second] in ("AwaitingConcurrencySlot", "Late")
    up.hold.unlink()
    wait_for(lambda: up.state(second) == "Completed", "the second ends")
    ended, began = up.notes / f"ended-{first}", up.notes / f"began-{second}"
    assert ended.stat().st_mtime <= began.stat().st_mtime


def test_a_changed_round_file_is_noticed(up: UserMachine) -> None:
    def said() -> str:
        items = up.told("status")["deployments"]
        return {item["name"]: item["state"] for item in items}["eagle3/tiny"]

    file = up.rounds / "tiny.yaml"
    assert said() == "current"
    file.write_text(file.read_text().replace("epochs: 5", "epochs: 6"))
    assert said() == "changed"
    up.eagle3("deploy")
    assert said() == "current"


def test_prefects_own_deploy_makes_the_same_deployments(up: UserMachine) -> None:
    render = (
        "from pathlib import Path; from deployments.catalogue import *;"
        "Path('deployments/prefect.yaml').write_text(render(catalogue(Path.cwd())))"
    )
    subprocess.run([sys.executable, "-c", render], cwd=up.base / "checkout", env=up.shell, check=True)
    ours = up.deployments()
    up.prefect("deploy", "--prefect-file", "deployments/prefect.yaml", "--all")
    theirs = up.deployments()
    assert len(ours) == 4
    assert theirs == ours


def test_an_enabled_schedule_stays_enabled(up: UserMachine) -> None:
    [nightly] = [
        item for item in up.post("deployments/filter", {}) if item["entrypoint"] == "flows/reextract.py:reextract"
    ]
    schedule = nightly["schedules"][0]["id"]
    up.ask("PATCH", f"deployments/{nightly['id']}/schedules/{schedule}", {"active": True})
    up.eagle3("deploy")
    active = {name: item["schedules"][0][0] for name, item in up.deployments().items() if item["schedules"]}
    assert active == {"flows/reextract.py:reextract": True, "flows/cleanup.py:cleanup": False}


@pytest.fixture
def impatient(up: UserMachine) -> Iterator[UserMachine]:
    """The automation of `eagle3 up` once more, with 10 s (the least that Prefect takes) in place of its 90."""
    [kept] = up.post("automations/filter", {})
    copy = {name: kept[name] for name in ("description", "actions")} | {"name": "impatient", "enabled": True}
    made = up.post("automations/", copy | {"trigger": kept["trigger"] | {"id": str(uuid4()), "within": 10}})
    yield up
    up.ask("DELETE", f"automations/{made['id']}")


def test_a_run_that_falls_silent_is_crashed_and_one_that_has_ended_is_not(impatient: UserMachine) -> None:
    """Heartbeats are posted here; that a flow's process sends them, and the 90 s, are seen in ``make test-long``."""
    flow = impatient.post("flows/", {"name": "silent"})["id"]
    running = {"flow_id": flow, "tags": [TAG], "state": {"type": "RUNNING", "name": "Running"}}
    silent, ended = (impatient.post("flow_runs/", running)["id"] for _ in range(2))
    for run in (ended, silent):
        impatient.beat(run)
    impatient.post(f"flow_runs/{ended}/set_state", {"state": {"type": "COMPLETED", "name": "Completed"}})
    wait_for(lambda: impatient.state(silent) == "Crashed", "the silent run is crashed")
    state = impatient.ask("GET", f"flow_runs/{silent}").json()["state"]
    assert state["message"].startswith("No heartbeat for 90 seconds")
    assert impatient.state(ended) == "Completed"


@pytest.mark.long
def test_a_run_whose_worker_and_process_were_killed_does_not_stay_running(up: UserMachine) -> None:
    up.hold.touch()
    run = up.begin()
    wait_for((up.notes / f"began-{run}").exists, "the run begins")
    beat = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": {"id": [f"prefect.flow-run.{run}"]}}
    wait_for(lambda: up.post("events/filter", {"filter": beat})["events"], "its heartbeat has come")
    worker = up.worker()
    psutil.Process(worker).kill()
    for process in find("PREFECT__FLOW_RUN_ID", run):
        os.kill(process.pid, signal.SIGKILL)
    assert up.state(run) == "Running"
    wait_for(lambda: up.state(run) == "Crashed", "the silent run is crashed", 400)
    state = up.ask("GET", f"flow_runs/{run}").json()["state"]
    assert state["message"].startswith("No heartbeat for 90 seconds")
    up.hold.unlink()
    assert json.loads(up.eagle3("up", "--json"))["worker_pid"] != worker
    after = up.begin()
    wait_for(lambda: up.state(after) == "Completed", "the next run ends")


def test_the_run_of_a_killed_worker_is_ended_before_the_next_worker_comes(up: UserMachine) -> None:
    up.hold.touch()
    for command in ("up", "down"):
        run = up.begin()
        wait_for((up.notes / f"began-{run}").exists, "the run begins")
        worker = up.worker()
        os.kill(worker, signal.SIGKILL)
        up.eagle3(command)
        assert (up.notes / f"ended-{run}").exists(), "its own clean-up ran"
        assert last_state(up, run) == "Crashed"
    assert living(up.state_dir) == []
    up.eagle3("up")


def test_down_cancels_what_runs_and_leaves_nothing(up: UserMachine) -> None:
    up.hold.touch()
    run = up.begin()
    wait_for((up.notes / f"began-{run}").exists, "the run begins")
    assert 'active = "eagle3"' in up.profiles.read_text()
    up.eagle3("down")
    assert last_state(up, run) == "Cancelled"
    assert (up.notes / f"ended-{run}").exists(), "the flow's own clean-up ran"
    assert living(up.state_dir) == []
    assert not port_in_use(up.port)
    assert up.profiles.read_text() == PROFILES
    assert json.loads(up.eagle3("down", "--json")) == {"stopped": False}


def test_a_taken_port_is_said_with_its_holder(machine: UserMachine) -> None:
    serve = f"server = socket.create_server(('127.0.0.1', {machine.port}))"
    listen = f"import socket, sys; {serve}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", listen], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        errors = machine.eagle3("up", status=1)
        holder.terminate()
    assert f"port {machine.port} is taken by another program, pid {holder.pid}" in errors
    assert "EAGLE3_API_PORT" in errors
    assert machine.profiles.read_text() == PROFILES


def test_an_interrupted_round_is_cancelled(machine: UserMachine) -> None:
    machine.hold.touch()
    before = set(machine.notes.glob("began-*"))
    process = machine.start("round", "tiny")
    wait_for(lambda: set(machine.notes.glob("began-*")) - before, "the round begins")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "is Cancelled" in errors
    assert errors.endswith("eagle3: interrupted.\n")
    assert "Traceback" not in errors
    assert living(machine.state_dir) == []


def test_a_killed_round_leaves_no_process_and_the_next_one_brings_its_own_stack(machine: UserMachine) -> None:
    machine.hold.touch()
    before = set(machine.notes.glob("began-*"))
    process = machine.start("round", "tiny")
    wait_for(lambda: set(machine.notes.glob("began-*")) - before, "the round begins")
    process.kill()
    process.communicate()
    wait_for(lambda: living(machine.state_dir) == [], "no process is left")
    assert not port_in_use(machine.port)
    machine.hold.unlink()
    facts = json.loads(machine.eagle3("round", "tiny", "--set", "train.epochs=2", "--json"))
    assert facts["state"] == "Completed", "the queue is free again"
    assert (machine.notes / f"began-{facts['run']}").read_text().endswith("{'train.epochs': 2}")
    assert living(machine.state_dir) == []
    assert machine.profiles.read_text() == PROFILES
