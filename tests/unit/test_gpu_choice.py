"""What is wrong with a GPU, which GPUs a round's processes see, and when a round is stopped for want of them."""

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infra.config.keys import key12
from infra.config.load import build_round
from infra.config.round import EngineConfig, RoundConfig, RungConfig
from infra.config.settings import Settings
from infra.engines.launch import Launch, LaunchRequest
from infra.engines.server.server import Server
from infra.engines.vllm.dialect import VllmDialect
from infra.errors import ConfigError, EngineError, PreflightError
from infra.machine.gpus.choice import allowed_gpus, cuda_names, device_environment
from infra.machine.gpus.holders import Holder
from infra.machine.gpus.policy import Act, Cleared
from infra.machine.gpus.readings import Gpu, GpuReport, Health
from infra.machine.gpus.verdict import Finding, judge
from infra.machine.gpus.xid import Xid, fatal_xids
from infra.machine.processes.guard import Identity
from infra.round import gpus as hygiene
from infra.round.context import RoundContext
from infra.targets.target import Target
from tasks import gpus as gpu_tasks

GIB = 1 << 30
MINE = Holder(Identity(7, 1), 70 * GIB, "same user", "me: python")
GONE = Holder(Identity(8, 1), 70 * GIB, "gone", "defunct")


def gpu(index: int = 0, **changes: Any) -> Gpu:
    fields = {"name": "H", "memory_total": 80 * GIB, "memory_used": 0, "utilisation": 0, "processes": ()}
    fields |= {"uuid": f"GPU-{index}{index}", "bus": f"00000000:0{index}:00.0"}
    return Gpu(index, **{**fields, **changes})


def look(index: int = 0, *holders: Holder, xids: tuple[Xid, ...] = (), visible: bool = True, **changes: Any) -> Finding:
    return judge(gpu(index, **changes), holders, 0.9, xids, visible)


@pytest.mark.parametrize(
    ("finding", "kinds", "said"),
    [
        (look(), [], "fit"),
        (look(memory_used=GIB // 2), [], "fit"),
        (look(0, MINE, memory_used=70 * GIB, utilisation=100), ["held"], "in use by pid 7 (me: python)"),
        (
            look(0, GONE, memory_used=70 * GIB),
            ["unfreed"],
            "75.2 GB held by no living process (it was pid 8 (defunct))",
        ),
        (look(memory_used=70 * GIB, visible=False), ["unfreed"], "no process that can be seen from here"),
        (look(utilisation=100), ["wedged"], "100 % busy with no living process"),
        (look(memory_total=8 * GIB, memory_used=GIB), ["short"], "7.5 GB free of the 7.7 GB wanted"),
        (look(mig=True, utilisation=None), ["mig"], "split into MIG instances"),
        (look(lost=True, faults=("name: GPU is lost",)), ["lost"], "GPU is lost"),
        (look(memory_used=None, faults=("memory: Unknown Error",)), ["unread"], "Unknown Error"),
        (look(health=Health(uncorrected=2)), ["broken"], "2 uncorrected memory errors"),
        (look(health=Health(rows_failed=True)), ["broken"], "could not be remapped"),
        (look(health=Health(reset_required=True), memory_total=None), ["broken"], "wants it reset"),
        (look(3, xids=(Xid("0000:03:00", 79, 60.0),)), ["broken"], "Xid 79 1 min ago: fell off the bus"),
        (look(3, xids=(Xid("0000:04:00", 79, 60.0),)), [], "fit"),
    ],
)
def test_the_verdict(finding: Finding, kinds: list[str], said: str) -> None:
    assert [trouble.kind for trouble in finding.troubles] == kinds
    assert said in str(finding)


def test_a_card_that_must_be_replaced_is_not_reset() -> None:
    assert not look(health=Health(rows_failed=True, rows_pending=True)).needs("reset")
    assert look(health=Health(rows_pending=True)).needs("reset")


def test_fatal_xids_are_read_from_the_kernels_log(tmp_path: Path) -> None:
    now = time.clock_gettime(time.CLOCK_MONOTONIC)

    def line(seconds: float, text: str) -> str:
        return f"4,1,{int((now - seconds) * 1e6)},-;{text}\n SUBSYSTEM=pci\n"

    log = tmp_path / "kmsg"
    log.write_text(
        line(5000, "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.")
        + line(50, "NVRM: Xid (PCI:0000:3b:00): 13, pid=9, Graphics Exception")
        + line(40, "NVRM: Xid (PCI:0000:5e:00): 48, pid=9, DBE")
        + line(30, "some Xid (PCI:0000:5e:00): 79")
    )
    (found,) = fatal_xids(log, since=min(3600.0, now))
    assert (found.code, round(found.age)) == (48, 40)
    assert found.concerns("00000000:5E:00.0")
    assert not found.concerns("00000000:3B:00.0")
    assert not found.concerns("")
    assert fatal_xids(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("", set()), ("-1", set()), ("0,2", {0, 2}), ("GPU-11, 0", {0, 1}), ("1,-1,0", {1})],
)
def test_what_the_environment_leaves_visible(value: str | None, expected: set[int] | None) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert allowed_gpus(environ, [gpu(0), gpu(1), gpu(2)]) == expected


@pytest.mark.parametrize("value", ["3", "GPU-9", "GPU-", "one"])
def test_an_environment_that_names_no_gpu_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"{value} is no GPU of this machine"):
        allowed_gpus({"CUDA_VISIBLE_DEVICES": value}, [gpu(0), gpu(1)])


def test_gpus_are_named_by_number_unless_one_does_not_answer() -> None:
    machine = [gpu(0), gpu(1), gpu(2)]
    assert device_environment(cuda_names(machine[1:], machine)) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "1,2",
    }
    assert cuda_names(machine[1:], [gpu(0, lost=True, uuid=""), *machine[1:]]) == ("GPU-11", "GPU-22")
    assert device_environment(()) == {}


def config(**overrides: Any) -> RoundConfig:
    fields = {
        "name": "box",
        "target": {"name": "any"},
        "extract": {"taps": [1]},
        "engines": {"vllm": {"device": "cuda", "tensor_parallel": 2}},
    }
    return build_round(fields, {name.replace("__", "."): value for name, value in overrides.items()})


def test_a_round_wants_as_many_gpus_as_its_widest_step() -> None:
    assert hygiene.gpus_wanted(config()) == 2
    assert hygiene.gpus_wanted(config(train__devices=4)) == 4
    assert hygiene.gpus_wanted(config(engines__vllm__device="cpu", train__devices=1)) == 0


def test_the_policy_decides_no_result() -> None:
    assert key12(config=config().extract) == key12(config=config(gpu__reset="if_alone").extract)
    default = config().gpu
    assert (default.end_own, default.end_same_user, default.reset, default.quarantine) == (True, False, "never", True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hygiene, "gpus", lambda: GpuReport(True, "", "1", (gpu(0), gpu(1), gpu(2))))


@pytest.mark.usefixtures("machine")
def test_processes_see_the_gpus_that_are_fit(tmp_path: Path) -> None:
    context = RoundContext(config(), Settings(state_dir=tmp_path))
    hygiene.use_gpus(context, Cleared((look(0), look(1), look(2)), (), True, ()))
    assert not context.devices  # nothing to say: they see all
    hygiene.use_gpus(context, Cleared((look(0), look(2)), (look(1, utilisation=100),), True, ()))
    assert context.devices == ("0", "2")
    hygiene.use_gpus(context, Cleared((look(2), look(0, MINE)), (), True, ()))
    assert context.devices == ("2", "0")  # the free one first


@pytest.mark.usefixtures("machine")
def test_too_few_stop_the_round_with_one_sentence(tmp_path: Path) -> None:
    context = RoundContext(config(), Settings(state_dir=tmp_path))
    with pytest.raises(PreflightError) as stopped:
        hygiene.use_gpus(context, Cleared((look(0),), (look(1, utilisation=100),), False, ()))
    assert "round box wants 2 GPUs and 1 of 2 are fit (GPU 1: 100 % busy with no living process)" in str(stopped.value)
    assert "nvidia-smi --gpu-reset" in str(stopped.value)


@pytest.mark.usefixtures("machine")
def test_every_act_is_an_event_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.logging import disable_run_logger

    cleared = Cleared((look(0), look(2)), (look(1),), True, (Act("quarantined", (1,), "goes on without GPU 1"),))
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu_tasks, "clear_gpus", lambda *_: cleared)
    monkeypatch.setattr(gpu_tasks, "emit_event", lambda **event: events.append(event))
    context = RoundContext(config(), Settings(state_dir=tmp_path))
    with disable_run_logger():
        assert gpu_tasks.ready_gpus.fn(context) == ["goes on without GPU 1"]
    (event,) = events
    assert event["event"] == "eagle3.gpu.quarantined"
    assert event["payload"] == {"round": "box", "gpus": [1], "text": "goes on without GPU 1"}
    assert context.devices == ("0", "2")


class PrintsItsEnvironment:
    """An engine that says which GPUs it was given, and ends."""

    name = "printer"
    dialect = VllmDialect()

    def version(self, device: str, settings: Settings) -> str:
        return "1"

    def launch(self, request: LaunchRequest, rung: RungConfig, port: int, settings: Settings) -> Launch:
        code = (
            "import os; print(os.environ.get('CUDA_DEVICE_ORDER'), os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True)"
        )
        return Launch((sys.executable, "-I", "-S", "-c", code), dict(rung.env), "printer")

    def phase(self, line: str) -> str | None:
        return None

    def cause(self, log: str) -> str | None:
        return log.strip()

    def served_version(self, base_url: str) -> str:
        return "1"


@pytest.mark.parametrize(
    ("devices", "env", "said"),
    [
        (("0", "2"), {}, "PCI_BUS_ID 0,2"),
        ((), {}, "None None"),
        (("0", "2"), {"CUDA_VISIBLE_DEVICES": "7"}, "PCI_BUS_ID 7"),  # a rung's own choice wins
    ],
)
def test_an_engine_is_given_the_gpus_that_were_chosen(
    devices: tuple[str, ...], env: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ladder = (RungConfig(name="only", env=env),)
    request = LaunchRequest(
        target=cast(Target, SimpleNamespace(name="any", revision="0")),
        config=EngineConfig(device="cpu", ladder=ladder),
        profile="generate",
        devices=devices,
    )
    with (
        Server(PrintsItsEnvironment(), request, Settings(state_dir=tmp_path)) as server,
        pytest.raises(EngineError, match=re.escape(said)),
    ):
        server.wait_ready()
