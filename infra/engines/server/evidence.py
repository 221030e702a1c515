"""What can be said of a hung server before it is ended: a file beside its log."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path

import psutil

from infra.engines.server.stall import tree
from infra.machine.logtail import last_lines
from infra.machine.processes.scrub import shown
from infra.units import size

LOG_LINES = 80
TOOL_SECONDS = 30.0
BUSY_SHARE = 0.05
"""Share of a processor above which a process's stack is worth its time, if it is not the only one."""


def gather(root: int, log: Path, why: str) -> Path:
    """Write down what a server does: its processes, their stacks, the GPUs, the end of its log.

    Stacks need py-spy and the right to trace (the same user, and ``kernel.yama.ptrace_scope`` 0, or root); what cannot
    be had is said in its place.

    Args:
        root: pid of the server's guard.
        log: the server's log.
        why: what was noticed.

    Returns:
        ``<log>.evidence.txt``, which only its owner may read.

    Raises:
        OSError: it could not be written whole.
    """
    path = log.with_suffix(".evidence.txt")
    processes = tree(root)
    with open(path, "a", opener=partial(os.open, mode=0o600)) as file:
        for title, text in _chapters(processes, log, why):
            file.write(f"== {title}\n{text.rstrip()}\n\n")
            file.flush()
    return path


def _chapters(processes: list[psutil.Process], log: Path, why: str) -> Iterator[tuple[str, str]]:
    yield "what was noticed", f"{datetime.now():%Y-%m-%d %H:%M:%S}: {why}"
    shares = _shares(processes)
    yield "its processes", "\n".join(_line(process, shares[process.pid]) for process in processes) or "none is left"
    for process in processes:
        if shares[process.pid] >= BUSY_SHARE or len(processes) == 1:
            yield f"stacks of {process.pid} (py-spy)", _stacks(process.pid)
    yield "GPUs (nvidia-smi)", _output("nvidia-smi")
    yield f"the last lines of {log.name}", last_lines(log, LOG_LINES)


def _shares(processes: list[psutil.Process]) -> dict[int, float]:
    """Share of one processor that each takes now, over half a second."""
    for process in processes:
        _share(process)
    psutil.wait_procs(processes, timeout=0.5)
    return {process.pid: _share(process) for process in processes}


def _share(process: psutil.Process) -> float:
    try:
        return process.cpu_percent() / 100
    except psutil.Error:
        return 0.0


def _line(process: psutil.Process, share: float) -> str:
    try:
        return (
            f"{process.pid} (child of {process.ppid()}): {process.status()}, {share:.0%} of a processor, "
            f"{size(process.memory_info().rss)}, {process.num_threads()} threads: "
            f"{' '.join(shown(tuple(process.cmdline())))[:400]}"
        )
    except psutil.Error as error:
        return f"{process.pid}: {error}"


def _stacks(pid: int) -> str:
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else "py-spy"
    return _output(tool, "dump", "--pid", str(pid))


def _output(tool: str, *arguments: str) -> str:
    """What a tool prints, or why there is nothing."""
    if shutil.which(tool) is None:
        return f"{tool} is not installed here"
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=TOOL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"{tool} gave no answer in {TOOL_SECONDS:.0f} s"
    except OSError as error:
        return f"{tool} could not be run: {error}"
    return done.stdout + done.stderr
