"""What ``infra`` logs and tells is seen in the run, whichever thread says it."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.context import get_run_context
from prefect.runtime import flow_run, task_run

import tasks  # noqa: F401 (it shows the logs of infra)
from infra.events import Event

log = logging.getLogger("infra.somewhere")
LINES = {"in the flow", "in the task", "in a thread", "told"}


@task
def works() -> str:
    log.info("in the task")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(log.info, "in a thread").result()
    Event("server.hang", "server.vllm-extract", "told").tell(log)
    return str(task_run.id)


@flow
def logs() -> tuple[str, str]:
    assert get_run_context() is not None
    log.info("in the flow")
    return str(flow_run.id), works()


@pytest.mark.usefixtures("api")
def test_lines_and_events_of_infra_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, dict[str, str]]] = []

    def keep(event: str, resource: dict[str, str], **_: Any) -> None:
        events.append((event, resource))

    monkeypatch.setattr("tasks.logs.emit_event", keep)
    log.info("before any run")
    flow_id, task_id = logs()
    wanted, deadline = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_id])), time.monotonic() + 30  # type: ignore[list-item]
    seen: dict[str, tuple[str, int]] = {}
    with get_client(sync_client=True) as client:
        while not seen.keys() >= LINES and time.monotonic() < deadline:
            time.sleep(0.1)
            lines = client.read_logs(wanted)
            seen = {line.message: (str(line.task_run_id), line.level) for line in lines if line.name == log.name}
    assert seen == {
        "in the flow": ("None", logging.INFO),
        "in the task": (task_id, logging.INFO),
        "in a thread": (task_id, logging.INFO),
        "told": (task_id, logging.WARNING),
    }
    resource = {"prefect.resource.id": "eagle3.server.vllm-extract", "prefect.resource.name": "vllm-extract"}
    assert events == [("eagle3.server.hang", resource)]
