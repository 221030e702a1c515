"""Ending processes that this project did not start, which only an explicit policy may ask for."""

import os
import time
from collections.abc import Collection
from pathlib import Path

from infra.machine.processes import guard
from infra.machine.processes.guard import Identity, Process
from infra.machine.processes.records import KILL_SECONDS


def end_family(first: Identity, spared: Collection[int], grace_seconds: float) -> tuple[int, ...]:
    """End a process, what descends from it and its process group: TERM, then KILL after the grace time.

    Only processes of the same user are ended, never this one or its ancestors, and never one of ``spared``. A group in
    which one of these is, is left alone but for the process and its descendants.

    Returns:
        Pids that were ended or asked to; empty when the process may not be ended, is gone, or its pid is another's now.
    """
    seen: set[Identity] = set()

    def find() -> list[Identity]:
        # One that was seen stays in view: it may lose its parents on the way.
        seen.update(_family(first, {*spared, *_ancestry()}))
        return [identity for identity in seen if guard.is_running(identity)]

    killing = time.monotonic() + grace_seconds
    guard.end_all(find, lambda: killing, time.sleep, killing + KILL_SECONDS)
    return tuple(sorted(identity.pid for identity in seen))


def _family(first: Identity, forbidden: set[int]) -> set[Identity]:
    table = guard.process_table()
    if not any(process.identity == first and process.running for process in table):
        return set()
    family = {first, *guard.below(first.pid, table)}
    if any(identity.pid in forbidden for identity in family):
        return set()
    group = _group(first.pid)
    members = {process.identity for process in table if group is not None and _group(process.identity.pid) == group}
    if not any(identity.pid in forbidden for identity in members):
        family |= members
    return {process.identity for process in table if process.identity in family and _may_end(process)}


def _may_end(process: Process) -> bool:
    try:
        return process.running and Path(f"/proc/{process.identity.pid}").stat().st_uid == os.getuid()
    except OSError:
        return False


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _ancestry() -> set[int]:
    """This process, its parent, and so on to the first."""
    found, pid = set(), os.getpid()
    while pid > 0:
        found.add(pid)
        process = guard.look_up(pid)
        pid = process.parent if process is not None else 0
    return found
