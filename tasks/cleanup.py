"""Cleanup: free what the retention policy allows, and say what went and why."""

from collections.abc import Iterable

from prefect import get_run_logger, task

from infra.disk.budget import removals
from infra.disk.leftovers import busy_rounds, clean_scratch, free
from infra.disk.retention import Removal, removable
from infra.machine.segments import forget_segments
from infra.progress import gib
from infra.round.context import Round
from tasks.options import STEP


def _freed(round_: Round, found: Iterable[Removal]) -> list[str]:
    log = get_run_logger()
    lines = []
    for item in found:
        if free(round_, item) is not None:
            lines.append(f"freed {gib(item.size)}: {item.path} ({item.why})")
            log.info(lines[-1])
    return lines


@task(task_run_name="cleanup before training", **STEP)
def cleanup_before_training(round_: Round) -> list[str]:
    """Free what a running round may: leftovers, superseded and earlier rounds' states; never those to be trained on."""
    lines = _freed(round_, removals(round_))
    forget_segments(round_.settings.run_dir)
    return lines


@task(task_run_name="cleanup after publishing", **STEP)
def cleanup_after_publishing(round_: Round) -> list[str]:
    """Free this round's own hidden states by policy, and its scratch: what counts is in the store by now.

    The samples are kept, so that the states can be extracted again.
    """
    busy = busy_rounds(round_.store, round_.settings)
    lines = _freed(round_, removable(round_.store, round_.config.name, round_.config.retention, busy))
    clean_scratch(round_)
    return lines
