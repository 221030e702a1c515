"""A Prefect server for the session, the stand-in engine in vLLM's place, and a machine with a finished round."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from standin.engine import StandInEngine
from standin.machine import Machine, Use, new_machine, prefect_server

import tasks
from flows.eagle3 import eagle3
from infra.engines import vllm


@pytest.fixture(scope="session")
def api() -> Iterator[str]:
    yield from prefect_server()


@pytest.fixture(scope="session", autouse=True)
def _standin() -> Iterator[None]:
    """The stand-in for vLLM, and retries without their pauses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "ENGINE", StandInEngine())
        for task in (tasks.generate, tasks.convention, tasks.extract, tasks.evaluate):
            patch.setattr(task, "retry_delay_seconds", 0)
        yield


@pytest.fixture(scope="session")
def finished(api: str, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A machine that did the small round once; tests work on copies of it."""
    machine = new_machine(tmp_path_factory.mktemp("finished"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine.environment.items():
            patch.setenv(name, value)
        eagle3(machine.config())
    return machine


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Makes this process work on a machine."""

    def on(machine: Machine) -> Machine:
        for name, value in machine.environment.items():
            monkeypatch.setenv(name, value)
        return machine

    return on


@pytest.fixture
def again(finished: Machine, use: Use, tmp_path: Path) -> Machine:
    """A copy of the machine with the finished round, in use; its journal is empty."""
    return use(finished.copy(tmp_path))
