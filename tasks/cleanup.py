"""Cleanup: free what the retention policy allows, and say what went and why."""

import shutil

from prefect import get_run_logger, task

from infra.steps.context import Round
from infra.steps.plan import gib
from infra.steps.retention import Removal, removable, remove
from tasks.options import STEP


def _freed(round_: Round, removals: list[Removal]) -> list[str]:
    log = get_run_logger()
    lines = [f"freed {gib(item.size)}: {item.path} ({item.why})" for item in removals]
    remove(round_.store, removals)
    for line in lines:
        log.info(line)
    return lines


@task(task_run_name="cleanup before training", **STEP)
def cleanup_before_training(round_: Round) -> list[str]:
    """Free earlier rounds' and superseded hidden states; this round's own are about to be trained on."""
    own = round_.prefix("hidden")
    found = removable(round_.store, round_.config.name, round_.config.retention)
    return _freed(round_, [item for item in found if item.path != own])


@task(task_run_name="cleanup after publishing", **STEP)
def cleanup_after_publishing(round_: Round) -> list[str]:
    """Free this round's own hidden states by policy, and its scratch: what counts is in the store by now.

    The samples are kept, so that the states can be extracted again.
    """
    lines = _freed(round_, removable(round_.store, round_.config.name, round_.config.retention))
    shutil.rmtree(round_.scratch)
    return lines
