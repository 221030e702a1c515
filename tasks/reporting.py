"""Report: report.md with figures in the store, and as an artifact in the UI."""

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from infra.report.files import inline_report, report_files
from infra.report.markdown import acceptance_table
from infra.results import Evaluation, Report, Training
from infra.round.context import Round
from infra.round.ledger import Ledger, done_steps, point, report_if_done
from infra.steps import report as steps
from infra.steps.plan import Plan
from tasks.options import STEP


@task(task_run_name="look for a finished round", **STEP)
def finished_report(round_: Round) -> Report | None:
    """The report of this round's keys when every step of it is done, shown again; else None."""
    found = report_if_done(round_)
    if found is None or not {"draft", "eval", "published"} <= done_steps(round_):
        return None
    for step in ("answers", "samples", "draft", "eval", "published", "report"):
        point(round_, step)
    _show(found)
    return found


@task(task_run_name="gather the report", **STEP)
def assemble(round_: Round, plan: Plan, training: Training, evaluation: Evaluation, ledger: Ledger) -> Report:
    """Everything known about the round at this moment."""
    return steps.build_report(round_, plan, training, evaluation, ledger)


@task(task_run_name="report", **STEP)
def report(round_: Round, made: Report, ledger: Ledger) -> Report:
    """Write the report and learn this machine's speeds for the next plan."""
    where = steps.write_report(round_, made, report_files(made))
    steps.learn_from(round_, made, ledger)
    _show(made)
    get_run_logger().info(f"report: {where}")
    return made


def _show(found: Report) -> None:
    create_table_artifact(key="acceptance", table=acceptance_table(found), description=f"Acceptance of {found.draft}")
    create_markdown_artifact(key="report", markdown=inline_report(found), description=f"Round {found.round}")
