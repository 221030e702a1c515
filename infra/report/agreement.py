"""Whether the prediction held in serving, in words."""

from infra.report.wording import percent
from infra.results import Paired, Report


def agreement(result: Report) -> str:
    """Step by step where that decides; the totals after it, or alone."""
    evaluation, paired = result.evaluation, result.evaluation.paired
    held = result.live("heldout")
    if held is None:
        return "No held-out prompts were served, so the prediction was not put to the test."
    off = abs(evaluation.deviation)
    totals = (
        f"predicted {evaluation.predicted.acceptance.length:.3f} for the same held-out prompts and "
        f"{held.acceptance.length:.3f} was served, {percent(off)} {'less' if evaluation.deviation < 0 else 'more'}"
    )
    if paired is not None and not paired.why_not:
        return f"{_steps(paired)} In all, walking the chain over stored states {totals}."
    why = f"Steps could not be compared: {paired.why_not}. The totals decide. " if paired is not None else ""
    bound = percent(evaluation.tolerance, 0)
    if off <= evaluation.tolerance:
        return f"{why}The prediction holds: walking the chain over stored states {totals} (bound {bound})."
    return (
        f"{why}**The prediction does not hold**: walking the chain over stored states {totals}, beyond the bound of "
        f"{bound}: training and serving do not see the same states."
    )


def _steps(paired: Paired) -> str:
    low, high = paired.differing_interval
    more = paired.difference_interval
    holds = low <= paired.bound
    verdict = "The prediction holds step by step" if holds else "**The prediction does not hold step by step**"
    return (
        f"{verdict}: {percent(paired.differing)} ({percent(low)} to {percent(high)}, bound "
        f"{percent(paired.bound, 0)}) of the {paired.active:,} steps that have a draft accepted get another number "
        f"accepted than the walk says. Of all {paired.steps:,} steps {percent(paired.same)} get exactly what it says, "
        f"and the mean is off by {paired.difference:+.3f} ({more[0]:+.3f} to {more[1]:+.3f}). These are the steps on "
        f"the {paired.shared_tokens:,} tokens ({percent(paired.shared, 0)}) that the served answers to "
        f"{paired.prompts} prompts share with the stored ones."
    )
