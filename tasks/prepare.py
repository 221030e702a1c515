"""Prepare: answers become samples."""

from prefect import task

from infra.round.context import RoundContext
from infra.round.ledger import Step
from infra.round.stored import point, sample_counts
from infra.steps import prepare as steps
from tasks.options import STEP


@task(task_run_name="prepare samples", **STEP)
def prepare(context: RoundContext, step: Step) -> None:
    """Build the samples and let the data gate judge them."""
    step.reused = steps.prepare(context)
    point(context, "samples")
    counts = sample_counts(context)
    dropped = ", ".join(f"{value} {name}" for name, value in counts.items() if value and name != "answers")
    step.detail = f"{len(context.samples)} samples, {context.samples.tokens:,} tokens; {dropped}"
