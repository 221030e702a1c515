"""Xid errors: what the NVIDIA driver has written about its GPUs into the kernel's log."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
LINE = re.compile(r"^\d+,\d+,(?P<microseconds>\d+),[^;]*;NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
RECENT_SECONDS = 3600.0
FATAL = {
    48: "uncorrected memory error",
    62: "its own controller halted",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "fell off the bus",
    95: "uncontained memory error",
    119: "its firmware does not answer",
    120: "error in its firmware",
}
"""Xids after which NVIDIA's list of Xid errors asks for a reset or a restart; most others are the program's fault."""


@dataclass(frozen=True)
class Xid:
    """One Xid error."""

    bus: str
    """Address on the PCI bus as the kernel writes it: ``0000:3b:00``."""
    code: int
    age: float
    """Seconds ago."""

    def concerns(self, bus: str) -> bool:
        """Whether it is about the GPU at this address, as NVML writes it (``00000000:3B:00.0``)."""
        return bool(bus) and bus.lower().rpartition(".")[0].endswith(self.bus.lower().partition(".")[0])


def fatal_xids(log: Path = KERNEL_LOG, since: float = RECENT_SECONDS) -> tuple[Xid, ...]:
    """Fatal Xids of the last ``since`` seconds; none where the log may not be read (it takes root, mostly)."""
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    found = []
    for match in filter(None, map(LINE.match, _lines(log))):
        age = now - int(match["microseconds"]) / 1e6
        if int(match["code"]) in FATAL and age <= since:
            found.append(Xid(match["bus"], int(match["code"]), age))
    return tuple(found)


def _lines(log: Path) -> list[str]:
    """The log's records (``Documentation/ABI/testing/dev-kmsg``: one a read, an error at the end)."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    text = b""
    try:
        while True:
            try:
                piece = os.read(descriptor, 65536)
            except BrokenPipeError:
                continue  # a record was overwritten while the log was read; the next read goes on after it
            except OSError:
                break
            if not piece:
                break
            text += piece
    finally:
        os.close(descriptor)
    return text.decode(errors="replace").splitlines()
