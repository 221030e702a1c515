"""Generate: the target answers the prompts."""

from prefect import get_run_logger, task

from infra.engines.client.client import Client
from infra.round.context import Round
from infra.round.ledger import Ledger, Step, point
from infra.round.serving import Serving
from infra.round.survival import Survival
from infra.steps import generate as steps
from tasks.notices import announce
from tasks.options import DELAYS, RETRIES, STEP, attempts, may_pass
from tasks.progress import ProgressArtifact


def _name() -> str:
    from prefect.runtime import task_run

    round_: Round = task_run.parameters["round_"]
    return f"generate {len(round_.prompts)} conversations"


@task(task_run_name=_name, retries=RETRIES, retry_delay_seconds=DELAYS, retry_condition_fn=may_pass, **STEP)
def generate(round_: Round, server: Serving, ledger: Ledger, step: Step) -> None:
    """Bring the answers to completion; starts the server only when something is missing, and anew when it dies."""
    ledger.notes += attempts()
    config = round_.config.generate
    if steps.answers_done(round_):
        step.came_to(whole=True, detail="all answers were there")
        point(round_, "answers")
        return
    kept = steps.answers_kept(round_)
    step.came_to(whole=False, part=bool(kept), detail=f"{len(kept)} answers of an earlier run kept" if kept else "")
    progress = ProgressArtifact("generate", "answers", server.log_tail)
    if config.answers == "target":
        _ask(round_, server, progress, sum(answer.finish_reason == steps.QUARANTINED for answer in kept))
    else:
        steps.generate(round_, None, progress)
    point(round_, "answers")
    ledger.started(server)
    server.stop()


def _ask(round_: Round, server: Serving, progress: ProgressArtifact, quarantined: int) -> None:
    """Ask the target, on as many servers as it takes; ``quarantined`` samples were left out before."""
    config, log = round_.config.generate, get_run_logger()
    survival = Survival(server, steps.answers_wanted(round_), config.max_quarantined, quarantined)
    server.on_notice = announce

    def asking(client: Client) -> steps.Asking:
        return steps.Asking(client, server.flights, survival.quarantined)

    survival.run(
        connect=lambda: server.watched(config.timeout_seconds, log.info),
        trial=lambda client, sample: steps.try_answer(round_, asking(client), sample),
        work=lambda client: steps.generate(round_, asking(client), progress),
    )
