"""The NVIDIA GPUs of this machine, as the driver (NVML) sees them: readings only, no judgement."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

Value = TypeVar("Value")

RECOVERY = {
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "reset",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "restart of the machine",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "drain of its peers",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "drain and reset",
}
"""What the driver asks for (nvml.h, nvmlDeviceGpuRecoveryAction_t); drivers before 570 do not tell."""

_NOT_TOLD = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
)
"""A card or a driver without the feature; not a fault of the GPU."""


@dataclass(frozen=True)
class Health:
    """What the driver says is wrong with a GPU's hardware; all defaults when healthy, or when it does not tell."""

    uncorrected: int = 0
    """Uncorrected ECC errors since the driver was loaded or the GPU was reset."""
    pages_pending: bool = False
    """Memory pages wait for a reset to be retired."""
    rows_pending: bool = False
    """Memory rows wait for a reset to be remapped."""
    rows_failed: bool = False
    """A row could not be remapped: the card must be replaced."""
    reset_required: bool = False
    """The driver answers questions with "GPU requires restart"."""
    recovery: str = ""
    """What the driver asks for: one of RECOVERY's values, or nothing."""


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
    """Pid and bytes of each process that computes or draws here; bytes are None where the driver does not tell."""
    faults: tuple[str, ...] = ()
    uuid: str = ""
    bus: str = ""
    """Address on the PCI bus as the driver writes it: ``00000000:3B:00.0``."""
    major: int | None = None
    """CUDA compute capability's first number: 8 is Ampere."""
    lost: bool = False
    """Whether the driver says that the GPU is gone from the bus."""
    mig: bool = False
    """Whether it is split into MIG instances and cannot be used whole."""
    health: Health = Health()


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
        with _driver():
            return _report()
    except pynvml.NVMLError as error:
        return GpuReport(False, f"this machine has no usable NVIDIA driver ({error})", "", ())


def nvlink_ends(index: int) -> frozenset[str]:
    """PCI addresses at the other ends of a GPU's active NVLinks: other GPUs, or the switches between them."""
    ends = set()
    try:
        with _driver():
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                if pynvml.nvmlDeviceGetNvLinkState(handle, link):
                    ends.add(_text(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
    except pynvml.NVMLError:
        return frozenset(ends)  # the driver ends the list of links with an error
    return frozenset(ends)


@contextmanager
def _driver() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _report() -> GpuReport:
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        found = tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        return GpuReport(False, f"the NVIDIA driver does not list its GPUs ({error})", "", ())
    reason = "" if found else f"the NVIDIA driver {driver} is loaded but sees no GPU"
    return GpuReport(bool(found), reason, driver, found)


class _Questions:
    """Questions to one GPU; errors are kept, so that one that fails does not hide the other answers."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.codes: set[int] = set()

    def ask(self, question: str, call: Callable[[], Value], *, optional: bool = False) -> Value | None:
        """The answer, or None; a card need not know the answer to an ``optional`` question."""
        try:
            return call()
        except pynvml.NVMLError as error:
            if not (optional and error.value in _NOT_TOLD):
                self.codes.add(error.value)
                self.faults.append(f"{question}: {error}")
            return None


def _gpu(index: int) -> Gpu:
    asked = _Questions()
    ask = asked.ask
    handle = ask("handle", lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        lost = pynvml.NVML_ERROR_GPU_IS_LOST in asked.codes
        health = Health(reset_required=pynvml.NVML_ERROR_RESET_REQUIRED in asked.codes)
        return Gpu(index, None, None, None, None, (), tuple(asked.faults), lost=lost, health=health)
    name = ask("name", lambda: _text(pynvml.nvmlDeviceGetName(handle)))
    memory = ask("memory", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
    rates = ask("utilisation", lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    running: Any = ask("processes", lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    drawing: Any = ask("graphics", lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle), optional=True)
    uuid = ask("uuid", lambda: _text(pynvml.nvmlDeviceGetUUID(handle)), optional=True)
    bus = ask("bus", lambda: _text(pynvml.nvmlDeviceGetPciInfo(handle).busId), optional=True)
    capability = ask("capability", lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle), optional=True)
    mig = ask("MIG", lambda: pynvml.nvmlDeviceGetMigMode(handle), optional=True)
    health = _health(handle, asked)
    processes = {int(one.pid): one.usedGpuMemory for one in (*(drawing or ()), *(running or ()))}
    return Gpu(
        index=index,
        name=name,
        memory_total=None if memory is None else int(memory.total),
        memory_used=None if memory is None else int(memory.used),
        utilisation=None if rates is None else int(rates.gpu),
        processes=tuple(processes.items()),
        faults=tuple(asked.faults),
        uuid=uuid or "",
        bus=bus or "",
        major=None if capability is None else int(capability[0]),
        lost=pynvml.NVML_ERROR_GPU_IS_LOST in asked.codes,
        mig=bool(mig and mig[0]),
        health=health,
    )


def _health(handle: Any, asked: _Questions) -> Health:
    kinds = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    uncorrected = asked.ask("ECC", lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, *kinds), optional=True)
    pages = asked.ask("retired pages", lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle), optional=True)
    rows: Any = asked.ask("remapped rows", lambda: pynvml.nvmlDeviceGetRemappedRows(handle), optional=True)
    fields: Any = asked.ask(
        "recovery",
        lambda: pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]),
        optional=True,
    )
    told = fields is not None and fields[0].nvmlReturn == pynvml.NVML_SUCCESS
    return Health(
        uncorrected=int(uncorrected or 0),
        pages_pending=bool(pages),
        rows_pending=bool(rows and rows[2]),
        rows_failed=bool(rows and rows[3]),
        reset_required=pynvml.NVML_ERROR_RESET_REQUIRED in asked.codes,
        recovery=RECOVERY.get(fields[0].value.uiVal, "") if told else "",
    )


def _text(value: str | bytes) -> str:
    """NVML's strings, which older bindings give as bytes."""
    return value.decode() if isinstance(value, bytes) else value
