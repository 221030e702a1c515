"""Flow ``eagle3``: from prompts to a published draft with measured acceptance.

Start it with ``prefect deployment run eagle3/smoke``; every deployment is a file in deployments/rounds.
"""

from typing import Any

from prefect import flow

import tasks
from flows.lifecycle import make_answers, make_samples, make_states
from infra.config.load import build_round
from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.results import Report
from infra.round.context import RoundContext
from infra.round.ledger import Ledger
from infra.round.status import look
from infra.steps.report import build_report
from tasks.credentials import use_store_credentials


def _run_name() -> str:
    from prefect.runtime import flow_run

    config = flow_run.parameters.get("config")
    name = config.get("name") if isinstance(config, dict) else getattr(config, "name", "round")
    return f"{name}-{flow_run.id[:8] if flow_run.id else 'local'}"


@flow(name="eagle3", flow_run_name=_run_name, persist_result=False)
def eagle3(config: RoundConfig, overrides: dict[str, Any] = {}) -> None:  # noqa: B006 (Prefect shows the default)
    """Train an EAGLE-3 draft for a target and measure it in serving.

    Args:
        config: The whole round: target, prompts, engines, taps, training, evaluation, budget.
        overrides: Changes to single fields by dotted name, e.g. {"train.epochs": 2}; merged into the round and
            checked again. Prefect replaces a parameter whole, so this is the way to change one field.
    """
    merged = build_round(config.model_dump(mode="json"), overrides, origin="the deployment's round")
    settings = Settings()
    use_store_credentials(settings)
    context = RoundContext(merged, settings)
    with tasks.ends_with_its_run(), context.lock():
        run_round(context)


def run_round(context: RoundContext) -> Report:
    """The lifecycle, in order. Each step looks first whether its verified result is there already."""
    ledger = Ledger()
    tasks.watch_disk(context, ledger)
    with ledger.step("plan"):
        plan = tasks.plan(context)
    with ledger.step("preflight"):
        ledger.notes += tasks.preflight(context, plan)
    status = look(context)
    if status.finished and status.report is not None:
        return tasks.report_again(context, status.report)
    with tasks.gpus_of(context, ledger):
        if status.states_needed or not status.samples.done:
            make_answers(context, ledger)
        if status.states_needed:
            make_states(context, status, ledger)
        elif not status.samples.done:
            make_samples(context, ledger)
        with ledger.step("cleanup"):
            ledger.notes += tasks.cleanup_before_training(context)
        with ledger.step("train", context.keys.draft) as step:
            training = tasks.train(context, step)
        with ledger.step("evaluate", context.keys.eval) as step:
            evaluation = tasks.evaluate(context, ledger, step)
    with ledger.step("publish", context.keys.published) as step:
        tasks.publish(context, build_report(context, plan, training, evaluation, ledger), step)
    ledger.look_at_disk(context)
    with ledger.step("cleanup after"):
        ledger.notes += tasks.cleanup_after_publishing(context)
    return tasks.report(context, build_report(context, plan, training, evaluation, ledger), ledger)
