"""Generate: the target answers the prompts."""

from prefect import task

from infra.round.context import RoundContext
from infra.round.ledger import Ledger, Step
from infra.round.serving import Serving
from infra.round.stored import point
from infra.round.survival import survive
from infra.steps import generate as steps
from infra.store.answers import AnswerLog
from tasks.options import DELAYS, RETRIES, STEP, attempts, may_pass
from tasks.progress import ProgressArtifact


def _name() -> str:
    from prefect.runtime import task_run

    context: RoundContext = task_run.parameters["context"]
    return f"generate {len(steps.talks(context))} conversations"


@task(task_run_name=_name, retries=RETRIES, retry_delay_seconds=DELAYS, retry_condition_fn=may_pass, **STEP)
def generate(context: RoundContext, server: Serving, ledger: Ledger, step: Step) -> None:
    """Bring the answers to completion; starts the server only when something is missing, and anew when it dies."""
    ledger.notes += attempts()
    config = context.config.generate
    if AnswerLog.finished(context.store, context.prefix("answers")):
        step.came_to(whole=True, detail="all answers were there")
        point(context, "answers")
        return
    kept = steps.answers_kept(context)
    detail = f"{kept.total()} answers of an earlier run kept" if kept else ""
    step.came_to(whole=False, part=bool(kept), detail=detail)
    progress = ProgressArtifact("generate", "answers", server.log_tail)
    if config.answers == "target":
        _ask(context, server, progress, kept[steps.QUARANTINED])
    else:
        steps.generate(context, None, progress)
    point(context, "answers")
    ledger.started(server)
    server.stop()


def _ask(context: RoundContext, server: Serving, progress: ProgressArtifact, quarantined: int) -> None:
    """Ask the target, on as many servers as it takes; ``quarantined`` samples were left out before."""
    config = context.config.generate
    for attempt in survive(server, steps.answers_wanted(context), config.max_quarantined, quarantined):
        with attempt:
            client = server.watched(config.timeout_seconds)
            asking = steps.Asking(client, server.flights, attempt.quarantined)
            for sample in attempt.suspects():
                steps.try_answer(context, asking, sample)
            steps.generate(context, asking, progress)
