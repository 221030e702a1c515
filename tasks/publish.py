"""The end of a round: the draft published, what may go freed, the report written and shown."""

from collections.abc import Iterable

from prefect import get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from infra.disk.candidates import after_publishing, candidates, free
from infra.disk.item import Item
from infra.disk.scratch import clean_scratch
from infra.machine.segments import forget_segments
from infra.report.card import cards
from infra.report.files import inline_report, report_files
from infra.report.markdown import acceptance_table
from infra.results import Report
from infra.round.context import RoundContext
from infra.round.ledger import Ledger, Step
from infra.round.publication import draft_name, publication_done
from infra.round.stored import RESULTS, point
from infra.steps.publish import publish as publish_draft
from infra.steps.report import learn_from, write_report
from infra.units import size
from tasks.options import STEP


@task(task_run_name="publish", **STEP)
def publish(context: RoundContext, made: Report, step: Step) -> None:
    """Publish the draft with its card, unless it is published already."""
    if publication_done(context):
        step.reused = True
        point(context, "published")
        return
    where = publish_draft(context, made, cards(made, context.config.target.source))
    point(context, "published")
    step.detail = draft_name(context)
    create_link_artifact(key="draft", link=where, link_text=draft_name(context))
    get_run_logger().info(f"published {where}")


def _freed(context: RoundContext, items: Iterable[Item]) -> list[str]:
    log = get_run_logger()
    lines = []
    for item in items:
        if free(context.store, context.settings, context.config.name, item) is not None:
            lines.append(f"freed {size(item.bytes)}: {item.path} ({item.why})")
            log.info(lines[-1])
    return lines


@task(task_run_name="cleanup before training", **STEP)
def cleanup_before_training(context: RoundContext) -> list[str]:
    """Free what a running round may: leftovers, superseded and earlier rounds' states; never those to be trained on."""
    name, policy, own = context.config.name, context.config.retention, context.prefix("hidden")
    lines = _freed(context, candidates(context.store, context.settings, name, policy, own))
    forget_segments(context.settings.run_dir)
    return lines


@task(task_run_name="cleanup after publishing", **STEP)
def cleanup_after_publishing(context: RoundContext) -> list[str]:
    """Free this round's own hidden states by policy, and its scratch: what counts is in the store by now.

    The samples are kept, so that the states can be extracted again.
    """
    found = after_publishing(context.store, context.settings, context.config.name, context.config.retention)
    lines = _freed(context, found)
    clean_scratch(context.store, context.scratch)
    return lines


@task(task_run_name="report", **STEP)
def report(context: RoundContext, made: Report, ledger: Ledger) -> Report:
    """Write the report and learn this machine's speeds for the next plan."""
    where = write_report(context, made, report_files(made))
    learn_from(context, made, ledger)
    _show(made)
    get_run_logger().info(f"report: {where}")
    return made


@task(task_run_name="report", **STEP)
def report_again(context: RoundContext, made: Report) -> Report:
    """Show the report of a finished round; its results become the live ones."""
    for step in RESULTS:
        point(context, step)
    _show(made)
    get_run_logger().info("every step of this round is done; nothing was redone")
    return made


def _show(made: Report) -> None:
    create_table_artifact(key="acceptance", table=acceptance_table(made), description=f"Acceptance of {made.draft}")
    create_markdown_artifact(key="report", markdown=inline_report(made), description=f"Round {made.round}")
