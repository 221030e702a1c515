"""A server's ladder, readiness, health and end, with a stand-in engine run as a real process."""

import sys
from pathlib import Path

import psutil
import pytest

from infra.config.round import EngineConfig, RungConfig, TargetShape
from infra.config.settings import Settings
from infra.config.target import Target
from infra.engines.base import find_engine, start
from infra.engines.dialect_vllm import VllmDialect
from infra.engines.launch import Launch, LaunchRequest
from infra.engines.server import Server
from infra.errors import EngineError
from infra.machine.processes import recorded

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


def request_for(*faults: str, ready_seconds: float = 60) -> LaunchRequest:
    shape = TargetShape(layers=2, hidden_size=8, vocab_size=9, weight_bytes=1, family="llama")
    rungs = tuple(RungConfig(name=f"r{number}-{fault}", flags=(fault,)) for number, fault in enumerate(faults))
    config = EngineConfig(device="cpu", ready_seconds=ready_seconds, ladder=rungs)
    return LaunchRequest(Target(name="t", path=Path("/nowhere"), shape=shape, revision="r"), config, "generate")


def test_the_ladder_is_walked_past_rungs_that_die(settings: Settings) -> None:
    said: list[str] = []
    with Server(FaultyEngine(), request_for("dies", "none"), settings) as server:
        server.wait_ready(said.append)
        server.check()
        assert server.rung == "r1-none"
        assert server.started_seconds > 0
        assert server.failed_rungs == [("r0-dies", "ValueError: no such attention backend (exit status 3)")]
        [alive] = [record.child_pid for record in recorded(settings.run_dir) if record.alive]
    assert not psutil.pid_exists(alive)
    assert "phase one" in said
    assert any("r0-dies failed" in words and "r1-none" in words for words in said)


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


def test_an_unknown_engine_is_refused_by_name(settings: Settings) -> None:
    for name in ("nothing", "os.path", "client"):
        with pytest.raises(EngineError, match=f"no engine '{name}'"):
            start(name, request_for("none"), settings)
    assert find_engine("vllm").name == "vllm"
