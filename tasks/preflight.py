"""Preflight: leftovers ended, target and engines there, machine fit; all in plain words before anything starts."""

from prefect import get_run_logger, task

from infra.errors import GateError, PreflightError, ProcessFailed, StoreError
from infra.machine.gpus.readings import gpus
from infra.machine.processes.guarded import reap
from infra.round.context import RoundContext
from infra.round.preflight import faults
from infra.round.start import fetch_start
from infra.steps.evaluate import evaluation_gate
from infra.steps.plan import Plan, plan_gate
from infra.steps.report import write_provenance
from infra.targets.fetch import fetch_target
from tasks.options import STEP


@task(task_run_name="preflight {context.config.name}", **STEP)
def preflight(context: RoundContext, planned: Plan) -> list[str]:
    """Make the machine fit for the round or say all that is missing at once; returns what was cleaned up.

    Raises:
        PreflightError: the machine lacks something; every fault is named.
        GateError: the plan does not fit, and nothing else is wrong; or the evaluation prompts will not do.
    """
    log = get_run_logger()
    settings = context.settings
    ended = _end_leftovers(context)
    for line in ended:
        log.warning(line)
    target = context.config.target
    if target.fetch and target.source and not (settings.models_dir / target.name / "config.json").is_file():
        fetch_target(target, settings.models_dir, settings.cache_dir)
    if planned.makes_draft:
        fetch_start(context.config.train.start, settings)
    report = gpus()
    if not report.present:
        log.info(f"no GPU: {report.reason}")
    lacks = faults(context.config, settings, report, serves=planned.makes_draft)
    try:
        plan_gate(context.config, planned)
    except GateError as error:
        if not lacks:
            raise
        lacks.append(str(error))
    if lacks:
        raise PreflightError(
            f"this machine cannot run round {context.config.name}: " + "; ".join(lacks),
            fix="mend these and start again",
        )
    swept = _sweep(context)
    for line in swept:
        log.warning(line)
    if planned.makes_draft:
        evaluation_gate(context)
        write_provenance(context)
    return ended + swept


def _end_leftovers(context: RoundContext) -> list[str]:
    """End what dead runs left; one that does not end stops nobody here: what it holds is looked at by itself."""
    if not context.config.gpu.end_own:
        return []
    try:
        reaped = reap(context.settings.run_dir)
    except ProcessFailed as error:
        return [str(error)]
    return [f"ended a leftover of an earlier run: {item.record.purpose}" for item in reaped if item.ended]


def _sweep(context: RoundContext) -> list[str]:
    """Remove what writers left that died; a store that does not list such things stops nobody."""
    try:
        swept = context.store.sweep_temporaries()
    except StoreError as error:
        return [f"half-written objects were not looked for: {error.what}"]
    return [f"removed {swept} half-written objects of writers that died"] if swept else []
