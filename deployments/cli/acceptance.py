"""The acceptance table that ends a round, read from the report in the store."""

from typing import TYPE_CHECKING

from deployments.cli.output import print_table
from infra.config.settings import Settings

if TYPE_CHECKING:
    from infra.results import Report


def read_report(settings: Settings, round_name: str) -> "tuple[Report, str] | None":
    """The round's live report and where its report.md is; None when the run left none."""
    from infra.results import Report
    from infra.store.objects import ObjectStore
    from infra.store.rounds import RoundStore

    store = ObjectStore(settings.store)
    rounds = RoundStore(store, round_name)
    pointer = rounds.current("report")
    if pointer is None:
        return None
    prefix = rounds.step_prefix("report", pointer.key)
    page = f"{prefix}/report.md"
    report = Report.model_validate_json(store.get(f"{prefix}/report.json"))
    return report, str(store.local_path(page) or f"{settings.store}/{page}")


def show(report: "Report", where: str) -> None:
    """Print acceptance, speed, the time by step, and where the whole report is."""
    from infra.report.drafts import others_table
    from infra.report.markdown import acceptance_table, plan_table, speed_table, steps_table, verdict

    engine = f"{report.evaluation.engine} {report.evaluation.engine_version}"
    _print(f"{report.round}: acceptance of {report.draft} in {engine}", acceptance_table(report))
    _print("other rounds of this target", others_table(report))
    _print("speed", speed_table(report))
    _print("time by step", steps_table(report))
    _print("plan and use", plan_table(report))
    print(verdict(report).replace("**", ""))
    for note in report.notes:
        print(f"note: {note}")
    print(f"Report: {where}")


def _print(title: str, rows: list[dict[str, str]]) -> None:
    if rows:
        print_table(title, list(rows[0]), [list(row.values()) for row in rows])
