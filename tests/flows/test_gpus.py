"""The GPU part of a round in a flow: a slot, then the GPUs themselves, and what is told of it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

import tasks
from deployments.api import connect
from deployments.upkeep import GPU_LIMIT, ensure_gpu_limit
from infra.config.load import build_round
from infra.config.settings import Settings
from infra.errors import PreflightError
from infra.machine.gpus.policy import Act, Cleared
from infra.machine.gpus.readings import Gpu, GpuReport
from infra.machine.gpus.verdict import judge
from infra.round import gpus as hygiene
from infra.round.context import RoundContext
from infra.round.ledger import Ledger
from tasks import gpus as gpu_tasks

GPUS = tuple(Gpu(number, "H", 1 << 36, 0, 100 * (number == 1), (), uuid=f"GPU-{number}") for number in range(3))
FOUND = tuple(judge(gpu, (), 0.9, (), True) for gpu in GPUS)


def round_on(device: str, folder: Path) -> RoundContext:
    fields = {
        "name": "box",
        "target": {"name": "any"},
        "extract": {"taps": [1]},
        "engines": {"vllm": {"device": device, "tensor_parallel": 2}},
    }
    return RoundContext(build_round(fields, {}), Settings(state_dir=folder))


@pytest.fixture(autouse=True)
def _slot(api: str) -> None:
    """The server has the slot, as after `eagle3 up`."""
    with connect(api) as client:
        ensure_gpu_limit(client)


@flow
def use_gpus(context: Any, ledger: Any, work: Any) -> None:
    with tasks.gpus_of(context, ledger):
        work()


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[dict[str, Any]]]:
    """Makes clearing end so; returns the list that events go to."""

    def end(enough: bool) -> list[dict[str, Any]]:
        fit, unfit = (FOUND[0], FOUND[2]) if enough else (FOUND[0],), (FOUND[1],)
        outcome = Cleared(fit, unfit, enough, (Act("quarantined", (1,), "goes on without GPU 1"),))
        events: list[dict[str, Any]] = []
        monkeypatch.setattr(hygiene, "gpus", lambda: GpuReport(True, "", "1", GPUS))
        monkeypatch.setattr(gpu_tasks, "clear_gpus", lambda *_: outcome)
        monkeypatch.setattr(gpu_tasks, "emit_event", lambda **event: events.append(event))
        return events

    return end


def test_a_round_goes_on_with_the_gpus_that_are_fit(
    tmp_path: Path, cleared: Callable[[bool], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    events, context, ledger, seen = cleared(True), round_on("cuda", tmp_path), Ledger(), []
    use_gpus(context, ledger, lambda: seen.append(context.devices))
    assert seen == [("0", "2")]
    assert ledger.notes == ["goes on without GPU 1"]
    assert [step.step for step in ledger.times] == ["gpus"]
    assert [event["event"] for event in events] == ["eagle3.gpu.quarantined"]
    assert "waiting for the GPU slot" in caplog.text


def test_two_rounds_do_not_share_gpus_because_the_slot_is_missing(
    tmp_path: Path, cleared: Callable[[bool], Any], api: str
) -> None:
    cleared(True)
    seen: list[int] = []
    with connect(api) as client:
        client.delete_global_concurrency_limit_by_name(GPU_LIMIT)
    with pytest.raises(PreflightError, match="GPU slot cannot be taken: .*`prefect gcl create gpu --limit 1`"):
        use_gpus(round_on("cuda", tmp_path), Ledger(), lambda: seen.append(1))
    assert seen == []


def test_a_round_without_enough_gpus_stops_before_it_works(tmp_path: Path, cleared: Callable[[bool], Any]) -> None:
    events, seen = cleared(False), []
    with pytest.raises(PreflightError, match="wants 2 GPUs and 1 of 2 are fit"):
        use_gpus(round_on("cuda", tmp_path), Ledger(), lambda: seen.append(1))
    assert seen == []
    assert len(events) == 1  # told, though the round stops


def test_a_round_on_the_cpu_asks_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Cleared:
        raise AssertionError("a CPU round looked at GPUs")

    monkeypatch.setattr(gpu_tasks, "clear_gpus", never)
    ledger, seen = Ledger(), []
    use_gpus(round_on("cpu", tmp_path), ledger, lambda: seen.append(1))
    assert seen == [1]
    assert ledger.times == []
