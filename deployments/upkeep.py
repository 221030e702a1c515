"""What a Prefect server must hold before a worker starts, and its unfinished runs when one stops."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

from deployments.api import LIVE, connect, runs
from deployments.environment import POOL
from infra.machine.detached import find

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

log = logging.getLogger(__name__)

GPU_LIMIT = "gpu"
WORKER = "eagle3"
"""Name of the worker that this project starts."""
CANCEL_SECONDS = 60.0
EXECUTES = "PREFECT__FLOW_RUN_ID"
"""Where Prefect tells a process the id of the flow run that it executes."""
WAITING = ("Scheduled", "Late", "AwaitingConcurrencySlot")


def ensure_pool(client: "SyncPrefectClient") -> None:
    """Create work pool ``eagle3`` (flow runs as processes), or unpause what :func:`cancel_all` paused."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    try:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
    except ObjectAlreadyExists:
        _pause(client, False)


def ensure_gpu_limit(client: "SyncPrefectClient") -> None:
    """Create concurrency limit ``gpu`` with one slot if it is missing; another number stays the user's choice."""
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
    from prefect.exceptions import ObjectAlreadyExists

    try:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=GPU_LIMIT, limit=1, active=True))
    except ObjectAlreadyExists:
        return


def settle(client: "SyncPrefectClient") -> None:
    """End what an earlier worker left running, and make its runs Crashed; to be called while no worker runs.

    A flow run's process outlives a worker that is killed: nobody could cancel it, and it holds its round's lock. A run
    that has no process here is left alone while a worker of another node polls the pool: it may be that one's.
    """
    from prefect.states import Crashed

    elsewhere = _other_workers(client)
    for run in runs(client, LIVE, pool=POOL):
        processes = find(EXECUTES, str(run.id))
        if elsewhere and not processes:
            log.info(f"run {run.name} is left to {', '.join(elsewhere)}")
            continue
        for process in processes:
            process.stop()
        message = "Its worker was stopped while it ran; start the round again, it resumes."
        client.set_flow_run_state(run.id, Crashed(message=message), force=True)
        log.info(f"run {run.name} had been left {run.state_name} by an earlier worker: now Crashed")


def _other_workers(client: "SyncPrefectClient") -> list[str]:
    """Names of the pool's workers that poll and are not this project's own, sorted."""
    found = client.read_workers_for_work_pool(POOL)
    return sorted(item.name for item in found if item.name != WORKER and item.status == "ONLINE")


def cancel_all(api: str) -> None:
    """Cancel every run that a worker holds and wait for their ends, ``CANCEL_SECONDS`` at most; queued runs stay.

    The work pool is paused, or the worker would begin a queued run as soon as a cancelled one lets go of its slot.
    """
    from prefect.states import Cancelling

    with connect(api) as client, _paused(client):
        asked = set[UUID]()
        deadline = time.monotonic() + CANCEL_SECONDS
        # Looked for again each time: the worker may have taken up one more just before the pause.
        while (left := runs(client, LIVE, pool=POOL)) and time.monotonic() < deadline:
            for run in left:
                if run.id not in asked:
                    asked.add(run.id)
                    log.info(f"cancelling run {run.name}")
                    client.set_flow_run_state(run.id, Cancelling(message="`eagle3 down`"))
            time.sleep(0.5)
        for run in left:
            log.info(f"run {run.name} did not end within {CANCEL_SECONDS:.0f} s; it is killed with the worker")
        waiting = [run for run in runs(client, ["SCHEDULED"], WAITING, POOL) if not run.auto_scheduled]
        if waiting:
            log.info(f"{len(waiting)} runs wait in the queue; they start with the next `eagle3 up`")


@contextmanager
def _paused(client: "SyncPrefectClient") -> Iterator[None]:
    """The pool paused, and left so for the server to be stopped; not so when that fails."""
    _pause(client, True)
    try:
        yield
    except BaseException:
        _pause(client, False)
        raise


def _pause(client: "SyncPrefectClient", paused: bool) -> None:
    """Whether workers are given runs of the pool."""
    from prefect.client.schemas.actions import WorkPoolUpdate

    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=paused))
