"""Cleanup: free what the retention policy allows, and say what went and why."""

from collections.abc import Iterable

from prefect import get_run_logger, task

from infra.disk.candidates import after_publishing, candidates, free
from infra.disk.item import Item
from infra.disk.scratch import clean_scratch
from infra.machine.segments import forget_segments
from infra.round.context import Round
from infra.units import size
from tasks.options import STEP


def _freed(round_: Round, items: Iterable[Item]) -> list[str]:
    log = get_run_logger()
    lines = []
    for item in items:
        if free(round_.store, round_.settings, round_.config.name, item) is not None:
            lines.append(f"freed {size(item.bytes)}: {item.path} ({item.why})")
            log.info(lines[-1])
    return lines


@task(task_run_name="cleanup before training", **STEP)
def cleanup_before_training(round_: Round) -> list[str]:
    """Free what a running round may: leftovers, superseded and earlier rounds' states; never those to be trained on."""
    name, policy, own = round_.config.name, round_.config.retention, round_.prefix("hidden")
    lines = _freed(round_, candidates(round_.store, round_.settings, name, policy, own))
    forget_segments(round_.settings.run_dir)
    return lines


@task(task_run_name="cleanup after publishing", **STEP)
def cleanup_after_publishing(round_: Round) -> list[str]:
    """Free this round's own hidden states by policy, and its scratch: what counts is in the store by now.

    The samples are kept, so that the states can be extracted again.
    """
    found = after_publishing(round_.store, round_.settings, round_.config.name, round_.config.retention)
    lines = _freed(round_, found)
    clean_scratch(round_.store, round_.scratch)
    return lines
