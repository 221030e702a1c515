"""Train: speculators' trainer in a guarded process, its metrics as artifacts."""

import base64

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from infra.report.figures import training_figure
from infra.report.markdown import live_table
from infra.results import Training
from infra.round import stored
from infra.round.context import RoundContext
from infra.round.ledger import Step
from infra.steps import train as steps
from tasks.options import DELAYS, RETRIES, STEP, may_pass
from tasks.progress import ProgressArtifact


@task(
    task_run_name="train {context.config.train.epochs} epochs",
    retries=RETRIES,
    retry_delay_seconds=DELAYS,
    retry_condition_fn=may_pass,
    **STEP,
)
def train(context: RoundContext, step: Step) -> Training:
    """Train the draft; a killed attempt is taken up at its last complete checkpoint, at once or by another run."""
    step.came_to(whole=stored.training(context) is not None, part=steps.begun(context))
    training = steps.train_draft(context, ProgressArtifact("train", "training"))
    figure = base64.b64encode(training_figure(training.history, training.validation)).decode()
    create_markdown_artifact(key="training", markdown=f"![training](data:image/png;base64,{figure})")
    create_table_artifact(
        key="validation", table=live_table(training.validation), description="Held-out, after each epoch"
    )
    step.detail = f"{training.steps} steps" + (", begun by an earlier run" if step.resumed else "")
    return training
