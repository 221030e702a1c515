"""Follows a flow run on a terminal: a line a step, which shows its progress while it runs; warnings as they come.

The details are in the run's log, on the server.
"""

import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID

from deployments.cli.output import say, show
from infra.errors import ProcessFailed
from infra.units import duration

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Log, TaskRun

POLL_SECONDS = 2.0
SILENT_SECONDS = 300.0
"""How long a run is still believed in whose server does not answer: a busy machine can keep it from that."""
OWN_WORDS = ("All deployment steps ", "Beginning ", "Finished in state ", "View at ", "Created ", "Submitted ")
"""How records begin in which Prefect itself tells what the steps' states tell as well."""
PARENT = "__parents__"
"""Among a task run's inputs where another task started it: it is a part of that one's line."""


def follow(api: str, run_id: UUID) -> str:
    """Show a run until it has ended; the name of its final state.

    Raises:
        ProcessFailed: the server did not answer for ``SILENT_SECONDS``.
    """
    from deployments.api import connect

    shown, answered, said, over = _Shown(run_id), time.monotonic(), False, False
    while True:
        try:
            with connect(api) as client:
                name, final = state_of(client, run_id)
                shown.update(client)
            answered, said = time.monotonic(), False
        except ProcessFailed as error:
            if time.monotonic() - answered > SILENT_SECONDS:
                raise
            if not said:
                say(f"{error.what}: run {run_id} is waited for")
            name, final, said = "unknown", False, True
        if over:
            return name
        over = final  # one more look: its last records come after its state
        time.sleep(POLL_SECONDS)


def state_of(client: "SyncPrefectClient", run_id: UUID) -> tuple[str, bool]:
    """Name of the run's state, and whether it is final."""
    state = client.read_flow_run(run_id).state
    return (state.name or state.type.value, state.is_final()) if state is not None else ("unknown", False)


class _Shown:
    """What of a run has been shown."""

    def __init__(self, run_id: UUID) -> None:
        self._run = run_id
        self._ended = set[UUID]()
        self._logs = 0
        self._last = ""

    def update(self, client: "SyncPrefectClient") -> None:
        """Say which steps have ended and what was warned of, and show how far the running one is."""
        steps = self._steps(client)
        for log in self._new_logs(client):
            if not log.message.startswith(OWN_WORDS):
                self._last = log.message.partition("\n")[0]
            if log.level >= logging.WARNING:
                say(_gist(log))
        for step in steps:
            if step.state is not None and step.state.is_final() and step.id not in self._ended:
                self._ended.add(step.id)
                say(_end(step))
                self._last = ""
        for step in steps:
            if step.state is not None and step.state.is_running():
                begun = step.start_time or step.expected_start_time or datetime.now(UTC)
                so_far = duration((datetime.now(UTC) - begun).total_seconds())
                show(f"{step.name}: {self._last or 'begun'} ({so_far} so far)")

    def _steps(self, client: "SyncPrefectClient") -> "list[TaskRun]":
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
        from prefect.client.schemas.sorting import TaskRunSort

        found = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[self._run])),
            sort=TaskRunSort.EXPECTED_START_TIME_ASC,
        )
        return [item for item in found if PARENT not in item.task_inputs]

    def _new_logs(self, client: "SyncPrefectClient") -> "list[Log]":
        from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

        logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[self._run])), offset=self._logs)
        self._logs += len(logs)
        return logs


def _end(step: "TaskRun") -> str:
    how = step.state_name or "ended"
    took = duration(step.total_run_time.total_seconds())
    return f"{step.name}: {took}" if how == "Completed" else f"{step.name}: {how} after {took}"


def _gist(log: "Log") -> str:
    """A record in a line: of a traceback the error, the rest is in the log on the server."""
    lines = [line for line in log.message.splitlines() if line.strip()]
    if not any(line.startswith("Traceback") for line in lines):
        return " ".join(lines)
    return lines[-1]
