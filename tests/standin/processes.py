"""Which processes there are."""

from pathlib import Path

import psutil

from infra.machine.detached import find


def running(process: int | psutil.Process) -> bool:
    """Whether a process runs; a zombie does not, nor does another one that was given its number since."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def living(state_dir: Path) -> list[int]:
    """Pids of the processes whose environment names this state folder, whoever their parent is."""
    return [process.pid for process in find("EAGLE3_STATE_DIR", str(state_dir))]
