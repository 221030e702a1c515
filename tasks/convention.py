"""Convention: which layers the engine really captures, measured against the target itself before any is trusted."""

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from infra.gates import convention as steps
from infra.report.figures import data_uri
from infra.report.layers import layers_figure, layers_table, layers_text
from infra.results import Convention
from infra.round import stored
from infra.round.context import RoundContext
from infra.round.ledger import Ledger, Step
from infra.round.serving import Serving
from infra.round.status import look
from tasks.options import DELAYS, RETRIES, STEP, attempts, may_pass


@task(task_run_name="convention", retries=RETRIES, retry_delay_seconds=DELAYS, retry_condition_fn=may_pass, **STEP)
def convention(context: RoundContext, server: Serving, ledger: Ledger, step: Step) -> None:
    """Let the convention gate judge the server; the result is stored only when it passes.

    The reference computes while the server loads.

    Raises:
        GateError: the engine captures other layers than it was asked for.
    """
    ledger.notes += attempts()
    done = look(context).convention_gate.done
    step.came_to(whole=done)
    if done:
        return
    log = get_run_logger()
    if context.config.gates.convention.reference == "none":
        result = steps.unchecked(context)
    else:
        tokens = steps.sequences(context)
        truth = steps.compute_truth(context, tokens)
        result = steps.measure(context, steps.capture(server, tokens), truth)
    text = layers_text(result, stored.parity(context))
    (log.info if result.reference else log.warning)(text)
    _show(result, text)
    steps.convention_gate(result)
    stored.write_gate(context, stored.convention_path(context), result)
    step.detail = f"reference {result.reference}, {result.tokens:,} tokens" if result.reference else "no reference"


def _show(result: Convention, text: str) -> None:
    """Table and heatmap, whether the gate is content or not."""
    figure = layers_figure(result)
    if figure is not None:
        create_table_artifact(key="layers", table=layers_table(result), description=text)
        text += f"\n\n![Error by tap]({data_uri(figure)})"
    create_markdown_artifact(key="convention", markdown=text, description=f"Layers that {result.engine} captures")
