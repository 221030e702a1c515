"""Preflight: leftovers ended, target and engines there, machine fit; all in plain words before anything starts."""

from prefect import get_run_logger, task

from infra.errors import GateError, PreflightError, ProcessFailed, StoreError
from infra.machine.gpus.readings import gpus
from infra.machine.processes.guarded import reap
from infra.round.context import Round
from infra.round.preflight import faults
from infra.steps.evaluate import evaluation_gate
from infra.steps.plan import Plan, plan_gate
from infra.steps.report import write_provenance
from infra.targets.fetch import fetch_target
from tasks.options import STEP


@task(task_run_name="preflight {round_.config.name}", **STEP)
def preflight(round_: Round, planned: Plan) -> list[str]:
    """Make the machine fit for the round or say all that is missing at once; returns what was cleaned up.

    Raises:
        PreflightError: the machine lacks something; every fault is named.
        GateError: the plan does not fit, and nothing else is wrong; or the evaluation prompts will not do.
    """
    log = get_run_logger()
    settings = round_.settings
    ended = _end_leftovers(round_)
    for line in ended:
        log.warning(line)
    target = round_.config.target
    if target.fetch and target.source and not (settings.models_dir / target.name / "config.json").is_file():
        fetch_target(target, settings.models_dir, settings.cache_dir)
    report = gpus()
    if not report.present:
        log.info(f"no GPU: {report.reason}")
    lacks = faults(round_.config, settings, report, serves=planned.makes_draft)
    try:
        plan_gate(round_.config, planned)
    except GateError as error:
        if not lacks:
            raise
        lacks.append(str(error))
    if lacks:
        raise PreflightError(
            f"this machine cannot run round {round_.config.name}: " + "; ".join(lacks), fix="mend these and start again"
        )
    swept = _sweep(round_)
    for line in swept:
        log.warning(line)
    if planned.makes_draft:
        evaluation_gate(round_)
        write_provenance(round_)
    return ended + swept


def _end_leftovers(round_: Round) -> list[str]:
    """End what dead runs left; one that does not end stops nobody here: what it holds is looked at by itself."""
    if not round_.config.gpu.end_own:
        return []
    try:
        reaped = reap(round_.settings.run_dir)
    except ProcessFailed as error:
        return [str(error)]
    return [f"ended a leftover of an earlier run: {item.record.purpose}" for item in reaped if item.ended]


def _sweep(round_: Round) -> list[str]:
    """Remove what writers left that died; a store that does not list such things stops nobody."""
    try:
        swept = round_.store.sweep_temporaries()
    except StoreError as error:
        return [f"half-written objects were not looked for: {error.what}"]
    return [f"removed {swept} half-written objects of writers that died"] if swept else []
