"""The acceptance table that ends a round, read from the report in the store."""

import json
from typing import Any

from deployments.cli.output import print_table
from infra.config.settings import Settings


def read_report(settings: Settings, round_name: str) -> dict[str, Any] | None:
    """The round's live ``report.json`` and where it is (``where``); None when the run left none."""
    from infra.store.objects import ObjectStore
    from infra.store.rounds import RoundStore

    store = ObjectStore(settings.store)
    rounds = RoundStore(store, round_name)
    pointer = rounds.current("report")
    if pointer is None:
        return None
    prefix = rounds.step_prefix("report", pointer.key)
    report: dict[str, Any] = json.loads(store.get(f"{prefix}/report.json"))
    page = f"{prefix}/report.md"
    return report | {"where": str(store.local_path(page) or f"{settings.store}/{page}")}


def show(report: dict[str, Any] | None) -> None:
    """Print the table and where the whole report is."""
    if report is None:
        print("the run left no report")
        return
    evaluation = report["evaluation"]
    rows = [_row(item) for item in evaluation["measured"]]
    predicted = evaluation["predicted"]["acceptance"]
    rows.append(
        ("predicted", "", f"{predicted['length']:.3f}", _interval(predicted), _shares(predicted), "", "", "", "")
    )
    print_table(
        f"{report['round']}: acceptance of {report['draft']} in {evaluation['engine']} {evaluation['engine_version']}, "
        f"{evaluation['drafts']} drafts",
        [
            "prompts",
            "at once",
            "acceptance length",
            "95 % interval",
            "by position %",
            "tok/s draft",
            "tok/s plain",
            "first token p50 s",
            "looping %",
        ],
        rows,
    )
    steps = [(item["step"], f"{item['seconds']:.1f}", "reused" if item["reused"] else "") for item in report["steps"]]
    print_table("time by step", ["step", "seconds", ""], steps)
    for note in report.get("notes", ()):
        print(f"note: {note}")
    print(f"Report: {report['where']}")


def _row(item: dict[str, Any]) -> tuple[str, ...]:
    acceptance = item["acceptance"]
    return (
        item["prompts"],
        str(item["concurrency"]),
        f"{acceptance['length']:.3f}",
        _interval(acceptance),
        _shares(acceptance),
        f"{item['draft']['tokens_per_second']:.0f}",
        f"{item['plain']['tokens_per_second']:.0f}",
        f"{item['draft']['first_token_p50']:.2f} / {item['plain']['first_token_p50']:.2f}",
        f"{100 * item['looping']:.0f}",
    )


def _interval(acceptance: dict[str, Any]) -> str:
    low, high = acceptance["interval"]
    return f"{low:.3f} to {high:.3f}"


def _shares(acceptance: dict[str, Any]) -> str:
    return " / ".join(f"{100 * share:.1f}" for share in acceptance["by_position"])
