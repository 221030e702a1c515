"""Parity: the engine that extracts and the engine that serves, given the same tokens."""

import shutil
from collections.abc import Sequence

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from infra.environments.building import using_environment
from infra.errors import PreflightError
from infra.gates import parity as steps
from infra.gates.agreement import Side
from infra.machine.gpus.readings import gpus
from infra.report.figures import data_uri
from infra.report.layers import parity_figure, parity_table, parity_text
from infra.results import Parity
from infra.round import stored
from infra.round.context import RoundContext
from infra.round.ledger import Ledger, Step
from infra.round.preflight import faults
from infra.round.serving import Serving
from infra.targets.fetch import fetch_target
from tasks.options import DELAYS, RETRIES, STEP, attempts, may_pass


@task(
    task_run_name="parity of {context.config.extract.engine} and {context.config.serve_with}",
    retries=RETRIES,
    retry_delay_seconds=DELAYS,
    retry_condition_fn=may_pass,
    **STEP,
)
def parity(context: RoundContext, server: Serving, ledger: Ledger, step: Step) -> None:
    """Let the parity gate judge the two engines; the result is stored only when it passes.

    The serving engine comes first and is gone before the extracting one loads, so that one at a time needs the memory
    and the second goes on with the extraction.

    Args:
        server: the extracting engine's server, which must not be up yet.

    Raises:
        GateError: the two do not compute the same.
    """
    ledger.notes += attempts()
    tokens = steps.sequences(context)
    server.stop()
    with Serving(context, "extract", engine=context.config.serve_with) as serving:
        serving_side = steps.take(serving, tokens)
        ledger.started(serving)
    extracting_side = steps.take(server, tokens)
    result = steps.judge(context, extracting_side, serving_side)
    show_parity(result)
    steps.parity_gate(result)
    stored.write_gate(context, stored.parity_path(context), result)
    step.detail = f"{serving_side.name} against {extracting_side.name}, {result.tokens:,} tokens"


@task(task_run_name="preflight of {context.extracting.device} {context.config.extract.engine}", **STEP)
def fit_for_parity(context: RoundContext, environment: str) -> None:
    """Fetch the target if the round says so, and see that the engine can run here.

    Args:
        environment: folder that takes the place of the engine's environment; empty: none.

    Raises:
        PreflightError: the machine lacks something; every fault is named.
    """
    settings, target = context.settings, context.config.target
    if target.fetch and target.source and not (settings.models_dir / target.name / "config.json").is_file():
        fetch_target(target, settings.models_dir, settings.cache_dir)
    with using_environment(steps.environment_of(context), environment):
        lacks = faults(context.config, settings, gpus(), serves=False)
    if lacks:
        raise PreflightError("this machine cannot compare these engines: " + "; ".join(lacks))


@task(
    task_run_name="states from {context.config.extract.engine} {environment}",
    retries=RETRIES,
    retry_delay_seconds=DELAYS,
    retry_condition_fn=may_pass,
    **STEP,
)
def parity_side(context: RoundContext, environment: str) -> Side:
    """What one engine makes of the round's prompts; its server is gone afterwards."""
    with (
        using_environment(steps.environment_of(context), environment),
        Serving(context, "extract", engine=context.config.extract.engine) as serving,
    ):
        side = steps.take(serving, steps.prompt_sequences(context))
    shutil.rmtree(context.scratch)
    return side


@task(task_run_name="compare", **STEP)
def parity_verdict(context: RoundContext, sides: Sequence[Side]) -> Parity:
    """Compare two sides, show it, and let the gate judge.

    Args:
        sides: of the engine that extracts, and of the one that serves.

    Raises:
        GateError: the two do not compute the same.
    """
    extracting_side, serving_side = sides
    result = steps.judge(context, extracting_side, serving_side)
    show_parity(result)
    steps.parity_gate(result)
    return result


def show_parity(result: Parity) -> None:
    """Table and heatmap, whether the gate is content or not."""
    create_table_artifact(key="parity", table=parity_table(result), description=parity_text(result))
    create_markdown_artifact(
        key="parity-heatmap",
        markdown=f"{parity_text(result)}\n\n![Error by tap and position]({data_uri(parity_figure(result))})",
        description=f"{result.serving} against {result.extracting}",
    )
