"""Plan: what the round would need, shown before anything starts."""

from collections.abc import Collection

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact

from infra.round.context import RoundContext
from infra.steps.plan import Plan, in_brief, make_plan
from infra.units import duration, size
from tasks.options import STEP


@task(task_run_name="plan {context.config.name}", **STEP)
def plan(context: RoundContext, only: Collection[str] = ()) -> Plan:
    """Plan the round, or ``only`` these steps; preflight stops it when it cannot fit, with all else that is missing."""
    made = make_plan(context, only)
    create_table_artifact(
        key="plan",
        table=[
            {
                "step": step.step,
                "key": step.key or "?",
                "done": "yes" if step.done else "no",
                "time": duration(step.seconds),
                "disk": size(step.disk_bytes),
                "what": step.what,
            }
            for step in made.steps
        ],
        description=f"{made.samples} samples, {made.tokens:,} tokens at {made.bytes_per_token:,} B, "
        f"{size(made.disk_bytes)} of disk ({size(made.disk_free)} free), about {duration(made.seconds)} to go."
        + "".join(f"\n\n- {note}" for note in made.notes),
    )
    get_run_logger().info(in_brief(made))
    return made
