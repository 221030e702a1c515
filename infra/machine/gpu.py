"""The NVIDIA GPUs of this machine, as the driver (NVML) sees them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

Value = TypeVar("Value")


@dataclass(frozen=True)
class Gpu:
    """One GPU; what the driver would not tell is None (or empty), and ``faults`` says why."""

    index: int
    """NVML's number: the order of the PCI bus, whatever CUDA_VISIBLE_DEVICES says."""
    name: str | None
    memory_total: int | None
    """Bytes."""
    memory_used: int | None
    """Bytes, those of processes that are gone too; without what the driver keeps for itself (as nvidia-smi counts)."""
    utilisation: int | None
    """Per cent of the last sampling period in which a kernel ran."""
    processes: tuple[tuple[int, int | None], ...]
    """Pid and bytes of each process that computes here; bytes are None where the driver does not tell."""
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpuReport:
    """All GPUs, or why there are none."""

    present: bool
    """Whether there is at least one GPU with a working driver."""
    reason: str
    """Why not, in one sentence; empty when present."""
    driver: str
    """The driver's version; empty when there is none."""
    gpus: tuple[Gpu, ...]


def gpus() -> GpuReport:
    """Ask the driver. No driver and no GPU are answers, not errors; a GPU's own errors are in its ``faults``."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuReport(False, f"this machine has no usable NVIDIA driver ({error})", "", ())
    try:
        return _report()
    except pynvml.NVMLError as error:
        return GpuReport(False, f"the NVIDIA driver does not list its GPUs ({error})", "", ())
    finally:
        pynvml.nvmlShutdown()


def _report() -> GpuReport:
    driver = _text(pynvml.nvmlSystemGetDriverVersion())
    found = tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    reason = "" if found else f"the NVIDIA driver {driver} is loaded but sees no GPU"
    return GpuReport(bool(found), reason, driver, found)


def _gpu(index: int) -> Gpu:
    faults: list[str] = []

    def ask(question: str, call: Callable[[], Value]) -> Value | None:
        try:
            return call()
        except pynvml.NVMLError as error:
            faults.append(f"{question}: {error}")
            return None

    handle = ask("handle", lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return Gpu(index, None, None, None, None, (), tuple(faults))
    name = ask("name", lambda: _text(pynvml.nvmlDeviceGetName(handle)))
    memory = ask("memory", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
    rates = ask("utilisation", lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    running: Any = ask("processes", lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return Gpu(
        index=index,
        name=name,
        memory_total=None if memory is None else int(memory.total),
        memory_used=None if memory is None else int(memory.used),
        utilisation=None if rates is None else int(rates.gpu),
        processes=tuple((int(one.pid), one.usedGpuMemory) for one in running or ()),
        faults=tuple(faults),
    )


def _text(value: str | bytes) -> str:
    """NVML's strings, which older bindings give as bytes."""
    return value.decode() if isinstance(value, bytes) else value
