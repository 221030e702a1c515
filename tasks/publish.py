"""Publish: the draft where an engine can load it."""

from prefect import get_run_logger, task
from prefect.artifacts import create_link_artifact

from infra.report.card import cards
from infra.results import Report
from infra.round.context import Round
from infra.round.ledger import Step
from infra.round.publication import draft_name, publication_done
from infra.round.stored import point
from infra.steps import publish as steps
from tasks.options import STEP


@task(task_run_name="publish", **STEP)
def publish(round_: Round, report: Report, step: Step) -> None:
    """Publish the draft with its card, unless it is published already."""
    if publication_done(round_):
        step.reused = True
        point(round_, "published")
        return
    where = steps.publish(round_, report, cards(report, round_.config.target.source))
    point(round_, "published")
    step.detail = draft_name(round_)
    create_link_artifact(key="draft", link=where, link_text=draft_name(round_))
    get_run_logger().info(f"published {where}")
