"""Disk, memory, processors and ports of this machine."""

import errno
import os
import socket
from pathlib import Path

import psutil

from infra.machine.disk import existing

_CGROUPS = Path("/sys/fs/cgroup")
_LOOPBACK = "127.0.0.1"


def free_disk(path: Path) -> int:
    """Bytes that this user may still write on the disk that holds ``path``, which need not exist yet."""
    stats = os.statvfs(existing(path))
    return stats.f_bavail * stats.f_frsize


def folder_bytes(path: Path) -> int:
    """Bytes of disk that a folder (or file) really uses: blocks, each hard-linked file once, links not followed.

    0 when there is nothing; what disappears while it is counted is not counted.
    """
    seen: set[tuple[int, int]] = set()
    total = 0
    queue = [path]
    while queue:
        place = queue.pop()
        try:
            stats = place.lstat()
            if os.path.isdir(place) and not place.is_symlink():
                queue.extend(place.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            continue
        if (stats.st_dev, stats.st_ino) not in seen:
            seen.add((stats.st_dev, stats.st_ino))
            total += stats.st_blocks * 512
    return total


def memory_available() -> int:
    """Bytes of memory that new processes can use without swapping, a container's limit (cgroup v2) respected."""
    free = psutil.virtual_memory().available
    for folder in _own_cgroups():
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            stats = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            reclaimable = int(stats.get("inactive_file", 0))
            free = min(free, max(0, int(limit) - int(used) + reclaimable))
    return free


def cpu_count() -> int:
    """Processors that this process may use: its affinity, and a container's quota (cgroup v2) rounded up."""
    count = len(os.sched_getaffinity(0))
    for folder in _own_cgroups():
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            count = min(count, -(-int(quota) // int(period)))
    return count


def free_port() -> int:
    """A TCP port of the loopback address that nothing uses now; another program may take it before you do."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def port_in_use(port: int) -> bool:
    """Whether a server could not listen on this port of the loopback address, because another one does."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are over do not count
        try:
            probe.bind((_LOOPBACK, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False


def port_holder(port: int) -> str:
    """Who listens on a TCP port of this machine, for a message: ``pid 12 (python -m http.server)``."""
    for connection in psutil.net_connections(kind="tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        if listens and connection.pid:
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                command = "?"
            return f"pid {connection.pid} ({command[:120]})"
    return "a process of another user"


def _own_cgroups() -> list[Path]:
    """This process's cgroup folder and those above it, as far as they can be seen."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            own = _CGROUPS / line[3:].lstrip("/")
            return [folder for folder in (own, *own.parents) if folder.is_relative_to(_CGROUPS)]
    return []


def _read(path: Path) -> str:
    """A kernel file's text, empty where this machine does not have it."""
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
