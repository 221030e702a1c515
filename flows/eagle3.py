"""Flow ``eagle3``: from prompts to a published draft with measured acceptance.

Start it with ``prefect deployment run eagle3/smoke``; every deployment is a file in deployments/rounds.
"""

from typing import Any

from prefect import flow, get_run_logger

import tasks
from infra.config.load import build_round
from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.results import Report
from infra.round.context import Round
from infra.round.ledger import Ledger
from infra.round.lock import round_lock
from infra.round.serving import Serving
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
    round_ = Round(merged, settings)
    with tasks.ends_with_its_run(), round_lock(round_):
        run_round(round_)


def run_round(round_: Round) -> Report:
    """The lifecycle, in order. Each step looks first whether its verified result is there already."""
    ledger = Ledger()
    tasks.watch_disk(round_, ledger)
    with ledger.step("plan"):
        plan = tasks.plan(round_)
    with ledger.step("preflight"):
        ledger.notes += tasks.preflight(round_, plan)
    finished = tasks.finished_report(round_)
    if finished is not None:
        get_run_logger().info("every step of this round is done; nothing was redone")
        return finished
    with tasks.gpus_of(round_, ledger):
        _states(round_, ledger)
        with ledger.step("cleanup"):
            ledger.notes += tasks.cleanup_before_training(round_)
        with ledger.step("train", round_.keys.draft) as step:
            training = tasks.train(round_, step)
        with ledger.step("evaluate", round_.keys.eval) as step:
            evaluation = tasks.evaluate(round_, ledger, step)
    with ledger.step("publish", round_.keys.published) as step:
        tasks.publish(round_, tasks.assemble(round_, plan, training, evaluation, ledger), step)
    ledger.look_at_disk(round_)
    with ledger.step("cleanup after"):
        ledger.notes += tasks.cleanup_after_publishing(round_)
    return tasks.report(round_, tasks.assemble(round_, plan, training, evaluation, ledger), ledger)


def _states(round_: Round, ledger: Ledger) -> None:
    """Answers, samples and verified hidden states, as far as what is still to be made needs them."""
    wanted = tasks.states_are_needed(round_)
    if not wanted and tasks.samples_are_whole(round_):
        return
    with Serving(round_, "generate") as server, ledger.step("generate", round_.keys.answers) as step:
        tasks.generate(round_, server, ledger, step)
    with Serving(round_, "extract") as server:
        with ledger.step("prepare", round_.keys.samples) as step:
            parity_is_due = wanted and tasks.parity_is_due(round_)
            needed = wanted and not parity_is_due and tasks.engine_may_load(round_) and tasks.extraction_is_due(round_)
            tasks.begin_loading(server, needed=needed)
            tasks.prepare(round_, step)
        if not wanted:
            return
        if parity_is_due:
            with ledger.step("parity") as step:
                tasks.parity(round_, server, ledger, step)
        with ledger.step("convention", round_.keys.hidden) as step:
            tasks.convention(round_, server, ledger, step)
        with ledger.step("extract", round_.keys.hidden) as step:
            tasks.extract(round_, server, ledger, step)
    with ledger.step("verify", round_.keys.hidden) as step:
        tasks.verify(round_, step)
