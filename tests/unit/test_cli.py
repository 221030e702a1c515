"""The command line without a server: what it understands, what it refuses, what it says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sample_report import build
from typer.testing import CliRunner
from unit.test_retention import finish

from deployments import profile
from deployments.cli import acceptance, doctor
from deployments.cli.app import app, main
from deployments.cli.output import size
from deployments.cli.rounds import parse_overrides
from deployments.environment import server_environment, worker_environment
from deployments.processes import Process, start_detached
from infra.config.settings import Settings
from infra.errors import ConfigError
from infra.machine.gpu import Gpu, GpuReport
from infra.store.objects import ObjectStore

CODE = Path(__file__).resolve().parents[2]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("EAGLE3_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("EAGLE3_CACHE_DIR", str(tmp_path / "cache"))
    return Settings()


@pytest.fixture
def bare(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a machine without environments (sizing the real ones takes a while)."""
    monkeypatch.setattr("infra.engines.environments.status", lambda cache_dir: [])
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


def test_every_command_explains_itself() -> None:
    runner = CliRunner()
    for command in ("up", "down", "status", "doctor", "round", "run", "deploy", "plan", "front", "target", "engines"):
        result = runner.invoke(app, [command, "--help"])
        assert result.exit_code == 0, command
        assert len(result.output.splitlines()) > 4


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
    assert [(item["path"], item["size"]) for item in facts["go"]] == [("rounds/smoke/hidden/h1", 1000)]
    assert {"rounds/smoke/samples"} <= {item["path"] for item in facts["stay"]}
    assert facts["bytes"] == 1000
    assert store.exists("rounds/smoke/hidden/h1/00000/states")

    assert run("clean", "--dry-run", monkeypatch=monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "would go: 1000 B" in shown
    assert "hidden states are extracted again from them" in shown

    assert run("clean", "--json", monkeypatch=monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["go"] == facts["go"]
    assert not store.exists("rounds/smoke/hidden/h1/00000/states")
    assert run("clean", monkeypatch=monkeypatch) == 0
    assert "deleted: 0 B" in capsys.readouterr().out


def test_children_get_our_settings_and_no_foreign_prefect(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://cloud.example/api")
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "for-the-store")
    worker = worker_environment(settings, "http://127.0.0.1:1/api")
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
    deadline = time.monotonic() + 20
    while not ((tmp_path / "child").exists() and (tmp_path / "child").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = Process.of(int((tmp_path / "child").read_text()))
    assert process.alive
    assert child.alive
    process.stop(grace_seconds=0.3)
    assert not process.alive
    assert not child.alive


def test_a_reused_pid_is_another_process() -> None:
    mine = Process.of(os.getpid())
    assert mine.alive
    stranger = Process(mine.pid, "another-boot:1")
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
        (gpu(0, ()), "ok", "0 B of 100.0 GiB"),
        (gpu(50 << 30, ((7, None),)), "note", "in use by pids [7]"),
        (gpu(50 << 30, ()), "fault", "no process holds that memory"),
        (gpu(0, (), ("fell off the bus",)), "fault", "fell off the bus"),
    ],
)
def test_doctor_on_gpus(
    report: GpuReport, state: str, said: str, bare: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.machine.gpu.gpus", lambda: report)
    [check] = [check for check in doctor.examine(bare) if check.name.startswith("GPU")]
    assert check.state == state
    assert said in check.found + check.fix


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
    ("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (547_000_000_000, "509.4 GiB"), (1 << 50, "1024.0 TiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text
