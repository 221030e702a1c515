"""Slow or hung: what a process tree does to the machine while it says nothing.

A load of ten minutes moves: the log gets lines, memory fills, files are read, the GPU's memory grows. A server that
spins in a loop does none of it, whatever share of a processor it takes.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from infra.machine.gpus.readings import gpus

MIB = 1 << 20
NOTABLE_BYTES = 16 * MIB
"""Growth of memory or reads that counts; less is the noise of an idle interpreter."""
SMALL_READ_BYTES = 512
"""Reads shorter than this are wake-ups (eventfd, pipes), not a load: a loop makes thousands of them a second."""

Vitals = Mapping[tuple[str, int], int]
"""Values that only a working server lets grow, by what they are and whose."""


def tree(root: int) -> list[psutil.Process]:
    """The processes below ``root`` (a guard, which adopts orphans), itself left out."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(root).children(recursive=True)
    return []


def vitals(root: int, log: Path, on_gpu: bool) -> dict[tuple[str, int], int]:
    """Bytes of log, and by process bytes of memory and bytes read; by GPU bytes in use.

    Args:
        root: pid whose descendants are looked at.
        on_gpu: ask the NVIDIA driver, too. A GPU's memory is taken whole: inside a container the driver's pids are not
            ours, so another program that allocates there can pass for a sign of life.
    """
    found = {("log", 0): log.stat().st_size if log.exists() else 0}
    for process in tree(root):
        found.update(_of_process(process))
    if on_gpu:
        found.update({("GPU memory", gpu.index): gpu.memory_used or 0 for gpu in gpus().gpus})
    return found


def _of_process(process: psutil.Process) -> Iterator[tuple[tuple[str, int], int]]:
    with suppress(psutil.Error):
        yield ("memory", process.pid), process.memory_info().rss
        counters = process.io_counters()
        yield ("disk reads", process.pid), counters.read_bytes
        long_reads = counters.read_chars - SMALL_READ_BYTES * counters.read_count
        yield ("reads", process.pid), max(0, long_reads)


class Movement:
    """When a server last moved, by looks at its vitals.

    Every value is held against the highest it had at the last movement, so that memory which goes up and down is one
    movement and not many.

    Args:
        look: gives the vitals.
        every: shortest time between two looks, seconds; they cost a few milliseconds.
    """

    def __init__(self, look: Callable[[], Vitals], every: float) -> None:
        self._look, self._every = look, every
        self._highest: dict[tuple[str, int], int] = dict(look())
        self._last_look = self._last_moved = time.monotonic()

    def still_seconds(self) -> float:
        """Seconds since the last movement, as far as it was looked at."""
        now = time.monotonic()
        if now - self._last_look >= self._every:
            self._last_look = now
            if self._moved(self._look()):
                self._last_moved = now
        return now - self._last_moved

    def _moved(self, seen: Vitals) -> bool:
        moved = False
        for key, value in seen.items():
            before = self._highest.get(key, 0)
            if value - before >= (1 if key[0] == "log" else NOTABLE_BYTES):
                self._highest[key] = value
                moved = True
        return moved
