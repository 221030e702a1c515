"""Slow or hung, which rung first, which samples kill: the supervisor with a scripted server as a real process."""

import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from standin.scripted import LOAD
from standin.waiting import more, wait_for

from infra.config.round import EngineConfig, RungConfig, TargetShape
from infra.config.settings import Settings
from infra.engines.client.client import Client, Sampling
from infra.engines.client.flights import Flights
from infra.engines.launch import Launch, LaunchRequest
from infra.engines.server.server import Server, ServerHung
from infra.engines.server.watch import LOOKS_A_SILENCE, Watch
from infra.engines.vllm.dialect import VllmDialect
from infra.engines.vllm.engine import Vllm
from infra.errors import EngineError
from infra.machine.processes.guarded import recorded
from infra.targets.target import Target

SCRIPT = Path(__file__).parents[1] / "standin" / "scripted.py"
STALL = 2.0
"""Seconds in which a loaded machine starts a Python, too."""


class ScriptedEngine:
    """Runs scripted.py; a rung's flags are its faults. Its log is vLLM's, and is read as vLLM's."""

    name = "scripted"
    dialect = VllmDialect()

    def version(self, device: str, settings: Settings) -> str:
        return "1.2.3"

    def launch(self, request: LaunchRequest, rung: RungConfig, port: int, settings: Settings) -> Launch:
        return Launch((sys.executable, str(SCRIPT), str(port), "mine", *rung.flags), {}, "mine")

    def phase(self, line: str) -> str | None:
        return Vllm().phase(line)

    def cause(self, log: str) -> str | None:
        return Vllm().cause(log)

    def served_version(self, base_url: str) -> str:
        return "1.2.3"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path / "state")


def request_for(*rungs: tuple[str, ...], stall_seconds: float = 60, revision: str = "r") -> LaunchRequest:
    shape = TargetShape(layers=2, hidden_size=8, vocab_size=9, weight_bytes=1, family="llama")
    ladder = tuple(RungConfig(name=f"r{number}", flags=flags) for number, flags in enumerate(rungs))
    config = EngineConfig(device="cpu", ready_seconds=120, stall_seconds=stall_seconds, ladder=ladder)
    target = Target(name="t", path=Path("/nowhere"), shape=shape, revision=revision)
    return LaunchRequest(target, config, "generate")


@pytest.mark.parametrize("fault", ["slow:6", "fills:6", "reads:6"])
def test_a_load_that_takes_longer_than_a_stall_but_moves_is_waited_for(
    fault: str, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Server(ScriptedEngine(), request_for((fault,), stall_seconds=STALL), settings) as server:
        states = [server.state]
        server.wait_ready()
        assert server.started_seconds > 2 * STALL
        states.append(server.state)
        assert server.failed_rungs == []
    assert [*states, server.state] == ["starting", "ready", "stopped"]
    if fault.startswith("slow"):
        assert {f"{server.purpose}: {phase}" for phase in ("loading weights: 1 of 1 files", "opening the port")} <= set(
            caplog.messages
        )


def test_a_server_that_spins_is_ended_with_evidence_and_the_next_rung_is_taken(settings: Settings) -> None:
    with Server(ScriptedEngine(), request_for(("spins",), (), stall_seconds=2 * STALL), settings) as server:
        [spinning] = [record.child_pid for record in recorded(settings.run_dir)]
        begin = time.monotonic()
        server.wait_ready()
        assert time.monotonic() - begin > 2 * STALL
        assert server.rung == "r1"
        [(name, reason)] = server.failed_rungs
    assert not psutil.pid_exists(spinning)
    assert name == "r0"
    assert reason.startswith("hung while loading weights: 0 of 1 files: in ")
    assert [event.name for event in server.events] == ["server.hang", "server.rung"]
    evidence = Path(reason.rpartition("evidence: ")[2])
    text = evidence.read_text()
    assert evidence.stat().st_mode & 0o777 == 0o600
    assert "Loading safetensors checkpoint shards:   0% Completed" in text
    assert f"{spinning} (child of" in text


@pytest.fixture
def tracing() -> None:
    """Skips the test where py-spy may not look into a child of this process."""
    tool = Path(sys.executable).with_name("py-spy")
    if not tool.exists():
        pytest.skip(f"{tool} is not there: build the environment `flows` anew")
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        done = subprocess.run([tool, "dump", "--pid", str(child.pid)], capture_output=True, text=True, check=False)
        child.kill()
    if done.returncode:
        pytest.skip(f"py-spy may not trace here (be root, or set kernel.yama.ptrace_scope to 0): {done.stderr.strip()}")


@pytest.mark.usefixtures("tracing")
def test_the_evidence_names_the_function_that_spins(settings: Settings) -> None:
    with (
        Server(ScriptedEngine(), request_for(("spins",), stall_seconds=2 * STALL), settings) as server,
        pytest.raises(ServerHung) as hung,
    ):
        server.wait_ready()
    evidence = re.search(r"evidence: (\S+\.evidence\.txt)", str(hung.value))
    assert evidence is not None
    assert "attention_backend_that_spins" in Path(evidence[1]).read_text()


def test_a_ladder_that_ends_with_a_hang_says_so(settings: Settings) -> None:
    with (
        Server(ScriptedEngine(), request_for(("spins",), stall_seconds=2 * STALL), settings) as server,
        pytest.raises(ServerHung, match=r"r0: hung while .*evidence: .*\.evidence\.txt"),
    ):
        server.wait_ready()
    assert not [record for record in recorded(settings.run_dir) if record.alive]


def test_the_rung_that_worked_comes_first_next_time(settings: Settings, tmp_path: Path) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_text("ValueError: no such attention backend\n")
    ladder = ((f"dies:{broken}",), ())
    begin(settings, request_for(*ladder), ["rung"], "r1")
    begin(settings, request_for(*ladder), ["remembered"], "r1")
    begin(settings, request_for(*ladder, revision="other"), ["rung"], "r1")
    (settings.state_dir / "rungs.json").write_text("{damaged")
    begin(settings, request_for(*ladder), ["rung"], "r1")


def test_a_remembered_rung_that_fails_gives_way_to_the_ladders_order(settings: Settings, tmp_path: Path) -> None:
    broken, first = tmp_path / "broken.txt", tmp_path / "first"
    broken.write_text("ValueError: not today\n")
    # r0 fails the first time only, r1 works the first time only.
    ladder = ((f"once:{first}", f"dies:{broken}"), (f"dies:{tmp_path / 'later.txt'}",), ())
    (tmp_path / "later.txt").write_text("RuntimeError: not any more\n")
    begin(settings, request_for(*ladder), ["rung", "rung"], "r2")
    server = begin(settings, request_for(*ladder), ["remembered"], "r2")
    assert server.failed_rungs == []
    memory = settings.state_dir / "rungs.json"
    memory.write_text(memory.read_text().replace('"r2"', '"r1"'))
    server = begin(settings, request_for(*ladder), ["remembered", "rung"], "r0")
    assert [name for name, _ in server.failed_rungs] == ["r1"]


def begin(settings: Settings, request: LaunchRequest, expected: list[str], rung: str) -> Server:
    with Server(ScriptedEngine(), request, settings) as server:
        server.wait_ready()
        assert server.rung == rung
    assert [event.name for event in server.events] == [f"server.{what}" for what in expected]
    return server


def test_a_rung_that_lost_its_port_is_tried_again(settings: Settings, tmp_path: Path) -> None:
    taken = tmp_path / "taken.txt"
    taken.write_text("OSError: [Errno 98] Address already in use\n")
    server = begin(settings, request_for((f"once:{tmp_path / 'made'}", f"dies:{taken}")), ["rung"], "r0")
    assert server.failed_rungs == []


@pytest.fixture
def serving(settings: Settings) -> Iterator[Callable[[str], tuple[Server, Flights]]]:
    servers: list[Server] = []

    def start(fault: str) -> tuple[Server, Flights]:
        servers.append(Server(ScriptedEngine(), request_for((fault,)), settings))
        servers[-1].wait_ready()
        return servers[-1], Flights()

    yield start
    for server in servers:
        server.stop()


def ask(server: Server, flights: Flights, sample: str) -> None:
    with Client(server.base_url, VllmDialect(), 60) as client, flights.of(sample):
        client.generate([1, 2, 3], Sampling(max_tokens=3))


@pytest.mark.parametrize(
    ("fault", "words"),
    [("stuck:3", "its token counters stand still"), ("deaf:3", "it answers neither /metrics nor /health")],
)
def test_a_server_that_hangs_while_it_serves_is_ended(
    fault: str, words: str, serving: Callable[[str], tuple[Server, Flights]]
) -> None:
    server, flights = serving(fault)
    watch = Watch(server, flights, silence_seconds=1.0)
    ask(server, flights, "a")
    ask(server, flights, "b")
    with pytest.raises(EngineError):
        ask(server, flights, "c")
    watch.stop()
    assert server.hang.startswith("hung: 1 requests in flight, none answered in ")
    assert words in server.hang
    assert flights.landed == 2
    assert flights.lost() == {"c"}
    assert Path(server.hang.rpartition("evidence: ")[2]).is_file()
    with pytest.raises(EngineError, match="ended"):
        server.check()


def test_a_server_that_hangs_is_ended_though_no_evidence_can_be_written(
    serving: Callable[[str], tuple[Server, Flights]],
) -> None:
    server, flights = serving("stuck:1")
    server.log.with_suffix(".evidence.txt").mkdir()
    watch = Watch(server, flights, silence_seconds=1.0)
    with pytest.raises(EngineError):
        ask(server, flights, "a")
    watch.stop()
    assert "; no evidence: [Errno 21] Is a directory" in server.hang
    assert server.ended


class SeenFlights(Flights):
    """Counts how often the watch looks at them."""

    looks = 0

    @property
    def in_flight(self) -> int:
        self.looks += 1
        return super().in_flight


def test_a_long_answer_and_an_idle_server_are_left_alone(serving: Callable[[str], tuple[Server, Flights]]) -> None:
    server, flights = serving("drips:5")[0], SeenFlights()
    watch = Watch(server, flights, silence_seconds=3.0)
    ask(server, flights, "a")
    assert flights.landed == 1
    wait_for(more(lambda: flights.looks, LOOKS_A_SILENCE + 2), "it is idle for longer than the silence")
    watch.stop()
    server.check()
    assert server.hang == ""


def test_a_watch_that_is_called_off_does_not_wait_for_its_look(
    serving: Callable[[str], tuple[Server, Flights]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, flights = serving("deaf:1")
    looking, answer = threading.Event(), threading.Event()

    def page(_path: str, _seconds: float = 5.0) -> None:
        looking.set()
        answer.wait(60)

    monkeypatch.setattr(server, "page", page)
    with flights.of("a"):
        watch = Watch(server, flights, silence_seconds=0.1)
        assert looking.wait(60)
        stopping = threading.Thread(target=watch.stop, daemon=True)
        stopping.start()
        stopping.join(30)
        assert not stopping.is_alive(), "a look takes its time on a busy machine, and whoever is ended has none"
        answer.set()
        wait_for(lambda: not watch._thread.is_alive(), "the look ends")
    assert (server.hang, server.ended) == ("", False)


def test_the_recorded_log_is_a_real_engines() -> None:
    lines = LOAD.read_text().splitlines()
    assert any("version 0.32.0" in line for line in lines)
    phases = [words for line in lines if (words := Vllm().phase(line)) is not None]
    assert phases[0] == "read its arguments"
    assert phases[-1] == "answering"
    assert Vllm().phase("Capturing CUDA graphs (decode, FULL):  21%|##  | 14/67 [00:01<00:05,  9.61it/s]") == (
        "capturing CUDA graphs: 14 of 67"
    )
