"""A server's ladder, readiness, health and end, with a stand-in engine run as a real process."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from infra.config.round import EngineConfig, RungConfig, TargetShape
from infra.config.settings import Settings
from infra.engines.launch import Launch, LaunchRequest
from infra.engines.registry import find_engine, start
from infra.engines.server.server import Server
from infra.engines.vllm.dialect import VllmDialect
from infra.errors import EngineError
from infra.machine.gpus.readings import Gpu, GpuReport
from infra.machine.processes.guarded import recorded
from infra.targets.target import Target

READY = 8.0
"""Seconds in which a loaded machine starts a Python, too."""

SCRIPT = """
import http.server, json, sys, time
port, name, fault = int(sys.argv[1]), sys.argv[2], sys.argv[3]
print("phase one", flush=True)
if fault == "dies":
    print("ValueError: no such attention backend", flush=True)
    sys.exit(3)
if fault == "hangs":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/v1/models":
            print("phase asked for its models", flush=True)
        sick = fault == "sick" and self.path == "/health" and self.server.seen > 3
        self.server.seen += 1
        self.send_response(503 if sick else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": name}]}).encode())
    def log_message(self, *_):
        pass
print("phase two", flush=True)
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
server.seen = 0
server.serve_forever()
"""


class FaultyEngine:
    """Runs SCRIPT; a rung's first flag is the fault it has."""

    name = "standin"
    dialect = VllmDialect()

    def version(self, device: str, settings: Settings) -> str:
        return "1.2.3"

    def launch(self, request: LaunchRequest, rung: RungConfig, port: int, settings: Settings) -> Launch:
        fault = rung.flags[0] if rung.flags else "none"
        name = "somebody-else" if fault == "stranger" else "mine"
        return Launch((sys.executable, "-c", SCRIPT, str(port), name, fault), {}, "mine")

    def phase(self, line: str) -> str | None:
        return line if line.startswith("phase") else None

    def cause(self, log: str) -> str | None:
        return next((line for line in log.splitlines() if "Error" in line), None)

    def served_version(self, base_url: str) -> str:
        return "1.2.3"


class OtherVersion(FaultyEngine):
    """Serves with another version than its environment claims."""

    def served_version(self, base_url: str) -> str:
        return "1.2.4"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path)


def request_for(*faults: str, ready_seconds: float = 60, devices: tuple[str, ...] = ()) -> LaunchRequest:
    """On the CPU, or on these GPUs."""
    shape = TargetShape(layers=2, hidden_size=8, vocab_size=9, weight_bytes=1, family="llama")
    rungs = tuple(RungConfig(name=f"r{number}-{fault}", flags=(fault,)) for number, fault in enumerate(faults))
    config = EngineConfig(device="cuda" if devices else "cpu", ready_seconds=ready_seconds, ladder=rungs)
    target = Target(name="t", path=Path("/nowhere"), shape=shape, revision="r")
    return LaunchRequest(target, config, "generate", devices=devices)


def test_the_ladder_is_walked_past_rungs_that_die(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Server(FaultyEngine(), request_for("dies", "none"), settings) as server:
        server.wait_ready()
        server.check()
        assert server.rung == "r1-none"
        assert server.started_seconds > 0
        assert server.failed_rungs == [("r0-dies", "ValueError: no such attention backend (exit status 3)")]
        [alive] = [record.child_pid for record in recorded(settings.run_dir) if record.alive]
    assert not psutil.pid_exists(alive)
    assert f"{server.purpose}: phase one" in caplog.messages
    assert any("r0-dies failed" in words and "r1-none" in words for words in caplog.messages)


def test_when_no_rung_works_each_is_named_with_why(settings: Settings) -> None:
    with Server(FaultyEngine(), request_for("dies", "hangs", ready_seconds=READY), settings) as server:
        with pytest.raises(EngineError, match=r"r0-dies: ValueError.*r1-hangs: not ready after 8 s, while phase one"):
            server.wait_ready()
        assert server.rung == "r1-hangs"
        assert not [record for record in recorded(settings.run_dir) if record.alive]
        with pytest.raises(EngineError, match="is stopped"):
            server.check()


def test_somebody_elses_server_on_the_port_is_not_taken_for_ours(settings: Settings) -> None:
    with (
        Server(FaultyEngine(), request_for("stranger", ready_seconds=READY), settings) as server,
        pytest.raises(EngineError, match="not ready after 8 s, while phase asked for its models"),
    ):
        server.wait_ready()


def test_another_version_than_the_environments_is_refused(settings: Settings) -> None:
    with (
        Server(OtherVersion(), request_for("none"), settings) as server,
        pytest.raises(EngineError, match=r"standin 1\.2\.4.*version 1\.2\.3"),
    ):
        server.wait_ready()


def test_a_server_that_dies_or_sickens_later_is_noticed(settings: Settings) -> None:
    with Server(FaultyEngine(), request_for("sick"), settings) as server:
        server.wait_ready()
        server.check()
        with pytest.raises(EngineError, match="answers 503: its engine is dead"):
            check_often(server)
    with Server(FaultyEngine(), request_for("none"), settings) as server:
        server.wait_ready()
        [record] = [record for record in recorded(settings.run_dir) if record.alive]
        child = psutil.Process(record.child_pid)
        child.kill()
        psutil.wait_procs([child], timeout=10)
        with pytest.raises(EngineError, match=r"ended: |does not answer"):
            server.check()


def check_often(server: Server) -> None:
    for _ in range(10):
        server.check()


class Driver:
    """What NVML says of two GPUs.

    Once a server is ``loaded`` GPU 0 holds 60 GiB while it runs, and for ``lingers`` looks after its end. From then on
    another program holds GPU 1.
    """

    def __init__(self, settings: Settings, lingers: int) -> None:
        self._settings, self._left = settings, lingers
        self.loaded = False

    def gpus(self) -> GpuReport:
        held, stranger = 1 << 30, 0
        if self.loaded:
            runs = any(record.alive for record in recorded(self._settings.run_dir))
            self._left -= not runs
            held, stranger = 1 << 30 if self.freed else 60 << 30, 50 << 30
        return GpuReport(True, "", "1", tuple(self._gpu(*item) for item in enumerate((held, stranger))))

    @property
    def freed(self) -> bool:
        return self._left < 0

    def _gpu(self, index: int, used: int) -> Gpu:
        return Gpu(index, "H", 80 << 30, used, 0, (), uuid=f"GPU-{index}")


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Callable[[int], Driver]:
    def machine(lingers: int) -> Driver:
        driver = Driver(settings, lingers)
        monkeypatch.setattr("infra.engines.server.freed.gpus", driver.gpus)
        monkeypatch.setattr("infra.engines.server.freed.POLL_SECONDS", 0.01)
        return driver

    return machine


@pytest.mark.parametrize("name", ["0", "GPU-0"])
def test_whoever_ends_a_server_finds_its_gpus_free(
    name: str, on_gpus: Callable[[int], Driver], settings: Settings
) -> None:
    driver = on_gpus(3)
    with Server(FaultyEngine(), request_for("none", devices=(name,)), settings) as server:
        server.wait_ready()
        driver.loaded = True
        assert not driver.freed
    assert driver.freed


def test_a_rung_whose_memory_stays_says_so(
    on_gpus: Callable[[int], Driver], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.engines.server.server.FREED_SECONDS", 0.1)
    driver = on_gpus(1_000_000)
    with Server(FaultyEngine(), request_for("dies", devices=("0",)), settings) as server:
        driver.loaded = True
        with pytest.raises(EngineError, match=r"r0-dies: .*; GPU 0 still holds 63\.4 GB more than before"):
            server.wait_ready()


def test_an_unknown_engine_is_refused_by_name(settings: Settings) -> None:
    for name in ("nothing", "os.path", "client"):
        with pytest.raises(EngineError, match=f"no engine '{name}'"):
            start(name, request_for("none"), settings)
    assert find_engine("vllm").name == "vllm"
