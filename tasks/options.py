"""How tasks of this project run: nothing is cached or pickled, and only what can pass by itself is retried."""

from typing import Any, TypedDict

from prefect.cache_policies import NO_CACHE, CachePolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import task_run
from prefect.tasks import Task

from infra.errors import EngineError, StoreError


class Options(TypedDict):
    """Keyword arguments of ``@task`` shared by all steps."""

    cache_policy: CachePolicy
    persist_result: bool


STEP: Options = {"cache_policy": NO_CACHE, "persist_result": False}
"""A resume believes manifests, never Prefect's cache, which says Cached after the files are gone."""

RETRIES = 2
DELAYS: list[float] = [5.0, 30.0]


def may_pass(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Retry condition: engine trouble, store trouble and the operating system's may pass; a gate's stop does not."""
    try:
        state.result()
    except (EngineError, StoreError, OSError):
        return True
    except Exception:
        return False
    return False


def attempts() -> list[str]:
    """A line for the report when the running task is not at its first attempt."""
    count = task_run.run_count or 1
    return (
        [f"{task_run.name}: attempt {count}, the earlier ones failed and were taken up where they stood"]
        if count > 1
        else []
    )
