"""NVML's own functions are replaced by a fake driver: the outermost boundary, for a machine without a GPU."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from infra.machine.gpus.readings import gpus

GIB = 2**30


class Driver:
    """A fake NVML with ``count`` GPUs; ``refuse`` maps a function to the (index, NVML error code) it fails with."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, count: int, refuse: dict[str, tuple[int, int]] | None = None
    ) -> None:
        self.refuse = refuse or {}
        self.open = 0
        answers = {
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetCount": lambda: count,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda index: f"GPU {index}".encode(),
            "nvmlDeviceGetMemoryInfo": lambda index, version=None: SimpleNamespace(
                total=80 * GIB,
                used=(index if version else index + 1) * GIB,  # without a version: the driver's own, too
            ),
            "nvmlDeviceGetUtilizationRates": lambda index: SimpleNamespace(gpu=index * 10),
            "nvmlDeviceGetComputeRunningProcesses": lambda index: [
                SimpleNamespace(pid=100 + index, usedGpuMemory=GIB),
                SimpleNamespace(pid=200, usedGpuMemory=None),
            ],
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, self.guarded(name, answer))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", self.missing)  # all that is not named above
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: self.count(1))
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: self.count(-1))

    def missing(self, name: str) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def count(self, step: int) -> None:
        self.open += step

    def guarded(self, name: str, answer: Any) -> Any:
        def call(*args: int, **options: int) -> Any:
            index, code = self.refuse.get(name, (None, 0))
            if code and args in ((), (index,)):
                raise pynvml.NVMLError(code)
            return answer(*args, **options)

        return call


def test_a_machine_without_a_driver_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    report = gpus()
    assert (report.present, report.gpus, report.driver) == (False, (), "")
    assert "no usable NVIDIA driver" in report.reason


def test_a_driver_without_a_gpu_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, 0)
    report = gpus()
    assert not report.present
    assert "580.1" in report.reason
    assert "sees no GPU" in report.reason
    assert driver.open == 0


def test_gpus_are_listed_with_their_memory_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, 2)
    report = gpus()
    assert report.present
    assert report.reason == ""
    assert report.driver == "580.1"
    first, second = report.gpus
    assert (second.index, second.name, second.utilisation) == (1, "GPU 1", 10)
    assert (second.memory_total, second.memory_used) == (80 * GIB, GIB)
    assert second.processes == ((101, GIB), (200, None))
    assert first.faults == second.faults == ()
    assert driver.open == 0


def test_what_one_gpu_does_not_tell_is_said_of_that_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, 2, {"nvmlDeviceGetUtilizationRates": (0, pynvml.NVML_ERROR_NOT_SUPPORTED)})
    first, second = gpus().gpus
    assert first.utilisation is None
    assert first.memory_total == 80 * GIB
    assert [fault.split(":")[0] for fault in first.faults] == ["utilisation"]
    assert second.utilisation == 10
    assert second.faults == ()


def test_a_lost_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, 3, {"nvmlDeviceGetHandleByIndex": (1, pynvml.NVML_ERROR_GPU_IS_LOST)})
    report = gpus()
    assert report.present
    assert [gpu.index for gpu in report.gpus] == [0, 1, 2]
    lost = report.gpus[1]
    assert lost.name is None
    assert lost.processes == ()
    assert "lost" in lost.faults[0].lower()
    assert lost.lost
    assert not report.gpus[0].lost
    assert report.gpus[2].faults == ()


def test_a_driver_that_fails_to_list_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, 2, {"nvmlDeviceGetCount": (0, pynvml.NVML_ERROR_UNKNOWN)})
    report = gpus()
    assert not report.present
    assert "does not list" in report.reason
    assert driver.open == 0
