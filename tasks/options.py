"""How tasks of this project run: nothing is cached or pickled, and only what can pass by itself is retried."""

from typing import Any, TypedDict

from prefect.cache_policies import NO_CACHE, CachePolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import task_run
from prefect.tasks import Task

from infra.drafter.trainer import TrainerKilled
from infra.engines.server.server import ServerHung
from infra.errors import EngineError, ExtractionFault, StoreError
from infra.round.survival import TooManyDeaths


class Options(TypedDict):
    """Keyword arguments of ``@task`` shared by all steps."""

    cache_policy: CachePolicy
    persist_result: bool


STEP: Options = {"cache_policy": NO_CACHE, "persist_result": False}
"""A resume believes manifests, never Prefect's cache, which says Cached after the files are gone."""

RETRIES = 2
DELAYS: list[float] = [5.0, 30.0]


def may_pass(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Retry condition: trouble of engine, store and system, and a killed trainer, may pass; a gate's stop does not.

    Nor does what has been tried again already, or would end the same: states that a living server gives wrongly, a
    server that died too often, a ladder that ends with a hang.
    """
    try:
        state.result()
    except (ExtractionFault, TooManyDeaths, ServerHung):
        return False
    except (EngineError, StoreError, OSError, TrainerKilled):
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
