"""Generate: the target answers the prompts."""

from prefect import get_run_logger, task

from infra.steps import generate as steps
from infra.steps.context import Round
from infra.steps.ledger import Ledger, Step, point
from infra.steps.serving import Serving
from tasks.options import DELAYS, RETRIES, STEP, attempts, may_pass
from tasks.progress import ProgressArtifact


def _name() -> str:
    from prefect.runtime import task_run

    round_: Round = task_run.parameters["round_"]
    return f"generate {len(round_.prompts)} conversations"


@task(task_run_name=_name, retries=RETRIES, retry_delay_seconds=DELAYS, retry_condition_fn=may_pass, **STEP)
def generate(round_: Round, server: Serving, ledger: Ledger, step: Step) -> None:
    """Bring the answers to completion; starts the server only when something is missing."""
    ledger.notes += attempts()
    if steps.answers_done(round_):
        step.reused, step.detail = True, "all answers were there"
        point(round_, "answers")
        return
    client = None
    if round_.config.generate.answers == "target":
        server.begin()
        client = server.ready(round_.config.generate.timeout_seconds, get_run_logger().info)
    earlier = steps.generate(round_, client, ProgressArtifact("generate", "answers", server.log_tail))
    point(round_, "answers")
    step.detail = f"{earlier} answers of an earlier attempt kept" if earlier else ""
    ledger.started(server)
    server.stop()
