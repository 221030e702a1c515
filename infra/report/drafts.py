"""The draft beside others: its layouts by engine, and other rounds of the same target."""

from infra.report.wording import PROMPTS, length
from infra.results import Report

Rows = list[dict[str, str]]


def others_table(result: Report) -> Rows:
    """Acceptance of this round beside other rounds of its target; empty when there are none."""
    if not result.others:
        return []
    return [
        {
            "round": item.round,
            "states from": item.states_from,
            "served by": item.served_by,
            "drafted": str(item.drafts),
            PROMPTS["heldout"]: length(item.heldout) if item.heldout is not None else "",
            PROMPTS["evaluation"]: length(item.evaluation) if item.evaluation is not None else "",
        }
        for item in (result.in_brief(f"{result.round} (this one)"), *result.others)
    ]


def layouts_table(result: Report) -> Rows:
    """One row a layout of the published draft; where there is none, why."""
    return [
        {
            "layout": layout.engine,
            "folder": layout.published or f"not published: {layout.why_not}",
            "layer ids": ", ".join(map(str, layout.layer_ids)),
            "made for": layout.made_for,
            "hold for": layout.holds_for,
        }
        for layout in result.layouts
    ]
