"""The stand-in engine in vLLM's place, and a machine with a finished round."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from standin.instead import instead_of_vllm
from standin.machine import Machine, Use, new_machine

from flows.eagle3 import eagle3


@pytest.fixture(scope="module", autouse=True)
def _standin() -> Iterator[None]:
    """The stand-in for vLLM, and retries without their pauses."""
    with pytest.MonkeyPatch.context() as patch:
        instead_of_vllm(patch)
        yield


@pytest.fixture(scope="session")
def finished(api: str, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A machine that did the small round once; tests work on copies of it."""
    machine = new_machine(tmp_path_factory.mktemp("finished"))
    with pytest.MonkeyPatch.context() as patch:
        instead_of_vllm(patch)
        eagle3(machine.enter(patch).config())
    return machine


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Makes this process work on a machine."""
    return lambda machine: machine.enter(monkeypatch)


@pytest.fixture
def again(finished: Machine, use: Use, tmp_path: Path) -> Machine:
    """A copy of the machine with the finished round, in use; its journal is empty."""
    return use(finished.copy(tmp_path))
