"""The flow ``parity`` and the gate in a round, with the stand-in engine; faults are planted in how it is launched."""

import asyncio
import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from standin.engine import StandInEngine
from standin.machine import Machine, Use, new_machine

from deployments.api import connect
from deployments.upkeep import ensure_gpu_limit
from flows.eagle3 import eagle3
from flows.parity import EngineChoice, parity
from infra.config.round import EngineName, RoundConfig, RungConfig
from infra.config.settings import Settings
from infra.engines.engine import Engine
from infra.engines.launch import Launch, LaunchRequest
from infra.engines.reference.process import ReferenceUnavailable
from infra.engines.sglang import engine as sglang
from infra.engines.vllm import engine as vllm
from infra.errors import ConfigError, GateError, PreflightError
from infra.gates import parity as parity_steps
from infra.machine.gpus.policy import Cleared
from infra.machine.gpus.readings import Gpu, GpuReport
from infra.machine.gpus.verdict import judge
from infra.machine.processes.guarded import recorded
from infra.round import gpus as hygiene
from infra.round.status import look
from infra.round.stored import report as stored_report
from tasks import gpus as gpu_tasks

pytestmark = pytest.mark.usefixtures("api")
VARIABLE = "EAGLE3_ENV_{}_CPU"


class VersionedEngine(StandInEngine):
    """Has the version, and plants the launch arguments, that files in its environment's folder name.

    What the engine in whose place it is can number and do stays.
    """

    def __init__(self, variable: str, place_of: Engine) -> None:
        self._variable = variable
        self.numbering, self.limits, self.wrappers = place_of.numbering, place_of.limits, place_of.wrappers

    def version(self, device: str, settings: Settings) -> str:
        return self._note("version") or super().version(device, settings)

    def launch(self, request: LaunchRequest, rung: RungConfig, port: int, settings: Settings) -> Launch:
        launch = super().launch(request, rung, port, settings)
        planted = self._note("arguments").split() if request.profile == "extract" else ()
        return replace(launch, command=(*launch.command, *planted))

    def _note(self, name: str) -> str:
        file = Path(os.environ[self._variable]) / name
        return file.read_text() if file.is_file() else ""


@pytest.fixture(autouse=True)
def _versioned(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in (vllm, sglang):
        variable = VARIABLE.format(engine.__name__.split(".")[-2].upper())
        monkeypatch.setattr(engine, "ENGINE", VersionedEngine(variable, engine.ENGINE))


@pytest.fixture
def machine(tmp_path: Path, use: Use) -> Machine:
    return use(new_machine(tmp_path))


def environment(folder: Path, version: str, arguments: str = "", engine: EngineName = "vllm") -> EngineChoice:
    """Another version of the engine, in a folder of its own."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "version").write_text(version)
    (folder / "arguments").write_text(arguments)
    return EngineChoice(engine=engine, environment=str(folder))


OURS = EngineChoice(engine="vllm")


async def artifacts() -> dict[str, Any]:
    async with get_client() as client:
        found = sorted(await client.read_artifacts(), key=lambda item: str(item.created))
        return {item.key: item for item in found if item.key}


def test_two_versions_that_agree_pass_and_leave_nothing(machine: Machine, tmp_path: Path) -> None:
    before = os.environ["EAGLE3_ENV_VLLM_CPU"]
    parity(machine.config(), OURS, environment(tmp_path / "next", "0.33.0"), samples=5)

    assert os.environ["EAGLE3_ENV_VLLM_CPU"] == before
    assert machine.launches() == {"extract": 2}
    assert {event["version"] for event in machine.events() if "launch" in event} == {"0.32.0", "0.33.0"}
    assert set(machine.requests("extract").values()) == {2}, "both were given the same tokens"
    assert len(machine.requests("extract")) == 5
    shown = asyncio.run(artifacts())
    assert "vllm 0.33.0 against vllm 0.32.0" in shown["parity"].description
    assert '"tap": "1"' in str(shown["parity"].data)
    assert "data:image/png;base64," in shown["parity-heatmap"].data
    assert recorded(Settings().run_dir) == []
    assert list(Settings().scratch_dir.iterdir()) == []


def test_sglang_on_the_cpu_is_compared_although_it_cannot_serve_a_draft_there(machine: Machine, tmp_path: Path) -> None:
    ours = environment(tmp_path / "vllm", "0.32.0")
    other = environment(tmp_path / "sglang", "0.5.23", engine="sglang")
    engines = dict.fromkeys(("vllm", "sglang"), machine.fields["engines"]["vllm"])
    parity(machine.config(), ours, other, overrides={"engines": engines})

    assert {event["version"] for event in machine.events() if "launch" in event} == {"0.32.0", "0.5.23"}


def test_slots_in_another_order_stop_with_a_sentence(machine: Machine, tmp_path: Path) -> None:
    other = environment(tmp_path / "next", "0.33.0", "--taps 1,3,2")
    with pytest.raises(GateError, match=r"parity gate: vllm 0\.33\.0 does not compute what vllm 0.32.0 computes.*"
                       r"tap 2 .* vllm 0\.33\.0 gives at tap 2 what vllm 0.32.0 gives at tap 3"):  # fmt: skip
        parity(machine.config(), OURS, other)
    assert "gives at tap 2" in str(asyncio.run(artifacts())["parity"].data), "it is shown also when it stops"
    assert recorded(Settings().run_dir) == []


def test_other_layers_stop_with_a_sentence(machine: Machine, tmp_path: Path) -> None:
    other = environment(tmp_path / "next", "0.33.0", "--taps 0,1,2")
    with pytest.raises(GateError, match="tap 1 differs by 1.*; tap 2 .*; tap 3 "):
        parity(machine.config(), OURS, other)


def test_a_missing_environment_and_an_engine_that_is_not_described_are_named(machine: Machine, tmp_path: Path) -> None:
    missing = EngineChoice(engine="vllm", environment=str(tmp_path / "nowhere"))
    with pytest.raises(PreflightError, match="cannot compare these engines: .*nowhere, which has no bin/python"):
        parity(machine.config(), OURS, missing)
    with pytest.raises(ConfigError, match="describes only"):
        parity(machine.config(), OURS, EngineChoice(engine="sglang"))
    assert machine.events() == []


def test_each_side_has_the_slot_and_gpus_of_its_own(
    machine: Machine, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine on the CPU, the other on GPUs of which one is not fit."""
    with connect(api) as client:
        ensure_gpu_limit(client)
    cards = tuple(Gpu(number, "H", 1 << 36, 0, 100 * (number == 1), (), uuid=f"GPU-{number}") for number in range(3))
    found = tuple(judge(card, (), 0.9, (), True) for card in cards)
    wanted, asked = list[int](), list[tuple[str, tuple[str, ...]]]()

    def clear(config: RoundConfig, *_: Any) -> Cleared:
        wanted.append(hygiene.gpus_wanted(config))
        return Cleared((found[0], found[2]), (found[1],), True, ())

    def reference(_target: Any, _settings: Any, _mode: str, device: str, devices: tuple[str, ...], *_: Any) -> Any:
        asked.append((device, devices))
        raise ReferenceUnavailable("none here")

    for module in (hygiene, import_module("tasks.parity")):  # `tasks.parity` is the task of that name
        monkeypatch.setattr(module, "gpus", lambda: GpuReport(True, "", "1", cards))
    monkeypatch.setattr(gpu_tasks, "clear_gpus", clear)
    monkeypatch.setattr(parity_steps, "Reference", reference)
    monkeypatch.setenv("EAGLE3_ENV_SGLANG_CUDA", sys.prefix)
    monkeypatch.setenv(VARIABLE.format("SGLANG"), sys.prefix)
    on_cpu = machine.fields["engines"]["vllm"]
    change = {
        "engines": {"vllm": on_cpu, "sglang": {**on_cpu, "device": "cuda", "tensor_parallel": 2}},
        "gates.convention.reference": "auto",
        "train.devices": 3,
    }
    seen: dict[str, tuple[str, ...]] = {}
    launch = VersionedEngine.launch

    def launched(self: VersionedEngine, request: LaunchRequest, *rest: Any) -> Launch:
        seen[request.config.device] = request.devices
        return launch(self, request, *rest)

    monkeypatch.setattr(VersionedEngine, "launch", launched)
    versions = {VARIABLE.format("VLLM"): "0.32.0", VARIABLE.format("SGLANG"): "0.5.23"}
    monkeypatch.setattr(VersionedEngine, "version", lambda self, *_: versions[self._variable])
    one, other = EngineChoice(engine="vllm"), EngineChoice(engine="sglang")
    parity(machine.config(), one, other, overrides=change)
    assert seen == {"cpu": (), "cuda": ("0", "2")}
    assert wanted == [2], "training's GPUs are not wanted where nothing is trained"
    assert asked == [("cpu", ())]

    parity(machine.config(), other, one, overrides=change)
    assert asked[1:] == [("cuda", ("0", "2"))]
    assert seen == {"cpu": (), "cuda": ("0", "2")}


@pytest.fixture
def two_engines(again: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What makes the small round extract with SGLang and serve with vLLM; both are the stand-in, in their versions."""
    for engine, version in (("SGLANG", "0.5.23"), ("VLLM", "0.32.0")):
        monkeypatch.setenv(VARIABLE.format(engine), environment(tmp_path / engine, version).environment)
    engines = dict.fromkeys(("vllm", "sglang"), again.fields["engines"]["vllm"])
    return {"engines": engines, "extract.engine": "sglang"}


def test_a_round_that_serves_with_another_engine_compares_them_before_it_extracts(
    again: Machine, two_engines: dict[str, Any]
) -> None:
    eagle3(again.config(), two_engines)

    changed = {name.replace(".", "__"): value for name, value in two_engines.items()}
    context = again.round(**changed)
    report = stored_report(context)
    assert report is not None
    assert report.parity is not None
    assert (report.parity.extracting, report.parity.serving) == ("sglang 0.5.23", "vllm 0.32.0")
    assert report.parity.argmax == 1.0
    steps = [item.step for item in report.steps]
    assert steps.index("prepare") < steps.index("parity") < steps.index("extract")
    assert again.launches()["extract"] == 2, "the extracting engine goes on with the extraction"
    prefix = context.prefix("report")
    assert b"## Parity" in context.store.get(f"{prefix}/report.md")
    assert context.store.get(f"{prefix}/parity.png").startswith(b"\x89PNG")

    again.forget()
    eagle3(again.config(), {**two_engines, "train.epochs": 1})
    assert again.launches()["extract"] == 0, "what was found to agree is not compared again"


def test_a_serving_engine_that_computes_other_states_stops_the_round_before_extraction(
    again: Machine, two_engines: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "VLLM" / "arguments").write_text("--taps 1,3,2")
    with pytest.raises(GateError, match=r"parity gate: vllm 0\.32\.0 does not compute what sglang 0\.5\.23 computes"):
        eagle3(again.config(), two_engines)
    context = again.round(**{name.replace(".", "__"): value for name, value in two_engines.items()})
    assert "hidden" not in look(context).done
    assert context.keys.hidden not in context.rounds.keys("hidden")
    assert max(again.requests("extract").values()) == 2, "no more was asked for than both engines' handful"
