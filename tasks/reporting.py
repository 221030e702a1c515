"""Report: report.md with figures in the store, and as an artifact in the UI."""

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from infra.report.files import inline_report, report_files
from infra.report.markdown import acceptance_table
from infra.results import Report
from infra.round.context import Round
from infra.round.ledger import Ledger
from infra.round.stored import point
from infra.steps import report as steps
from tasks.options import STEP


@task(task_run_name="report", **STEP)
def report(round_: Round, made: Report, ledger: Ledger) -> Report:
    """Write the report and learn this machine's speeds for the next plan."""
    where = steps.write_report(round_, made, report_files(made))
    steps.learn_from(round_, made, ledger)
    _show(made)
    get_run_logger().info(f"report: {where}")
    return made


@task(task_run_name="report", **STEP)
def report_again(round_: Round, made: Report) -> Report:
    """Show the report of a finished round; its results become the live ones."""
    for step in ("answers", "samples", "draft", "eval", "published", "report"):
        point(round_, step)
    _show(made)
    get_run_logger().info("every step of this round is done; nothing was redone")
    return made


def _show(made: Report) -> None:
    create_table_artifact(key="acceptance", table=acceptance_table(made), description=f"Acceptance of {made.draft}")
    create_markdown_artifact(key="report", markdown=inline_report(made), description=f"Round {made.round}")
