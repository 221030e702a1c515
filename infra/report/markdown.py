"""The round's report as markdown, and its tables as rows for the command line and for Prefect's table artifacts."""

from collections.abc import Mapping, Sequence

from infra.report.agreement import agreement
from infra.report.drafts import layouts_table, others_table
from infra.report.layers import layers_table, layers_text, parity_table, parity_text
from infra.report.wording import (
    PROMPTS,
    SAME_SPEED,
    between,
    between_tokens,
    headline,
    in_flight,
    length,
    milliseconds,
    most_in_flight,
    percent,
    ratio,
    speculates,
    speed_runs,
    table,
)
from infra.results import Acceptance, Measured, Report, Speed, TrainPoint
from infra.units import duration, size

Rows = list[dict[str, str]]
LOOPING = 0.1
"""Share of looping answers from which the verdict warns: repetition is easy to draft and flatters acceptance."""
SAME_DRAFTS = 0.05
"""Relative difference from what was asked for below which the drafts of a step are not told: an answer's end cuts."""
NOT_MEASURED = "Which layers the engine captured is not told: no whole measurement lies beside these states."
OTHERS = "Acceptance lengths, as each round's own report says; a round may have other prompts, lengths and settings."


def report(result: Report, figures: Mapping[str, str]) -> str:
    """The whole report.

    Args:
        result: the finished round.
        figures: where each figure lies, by name (``training``, ``acceptance``, ``throughput``): a path relative to
            the report or a ``data:`` URI. Figures that are missing are left out.
    """
    blocks = [
        f"# Round {result.round}: {result.draft}",
        result.description,
        verdict(result),
        "## Acceptance",
        table(acceptance_table(result)),
        "Acceptance length counts the tokens of one step of the target, its own included: 1.0 is no speculation. "
        "In brackets is the 95 % bootstrap interval over prompts. Positions show acceptance rates: the share of draft "
        "starts whose draft there was accepted.",
        _image(figures, "acceptance", "Acceptance rate by position"),
        "## Speed",
        table(speed_table(result)),
        "TTFT is the time to the first token, ITL the time between tokens, seen by the client: median / 95th (and "
        f"99th) percentile. {_steady(result)}{_layout(result)}",
        _image(figures, "throughput", "Throughput without and with the draft"),
        "## Training",
        _training(result),
        _image(figures, "training", "Loss and joint accuracy over the training steps"),
        "## Layers",
        layers_text(result.convention, result.parity) if result.convention else NOT_MEASURED,
        table(layers_table(result.convention)) if result.convention else "",
        _image(figures, "layers", "Error of each captured tap against each layer of the reference"),
        "## Parity" if result.parity else "",
        parity_text(result.parity) if result.parity else "",
        table(parity_table(result.parity)) if result.parity else "",
        _image(figures, "parity", "Error between the two engines by tap and position"),
        "## Steps",
        table(steps_table(result)),
        "## Counts",
        _counts(result),
        "## Records left out" if result.left_out else "",
        table(left_out_table(result)),
        "## Plan and use",
        table(plan_table(result)),
        "## Provenance",
        table(provenance_table(result)),
        "## Published" if result.layouts else "",
        table(layouts_table(result)),
        "## Other rounds of this target" if result.others else "",
        table(others_table(result)),
        OTHERS if result.others else "",
        "## Notes" if result.notes else "",
        "\n".join(f"- {' '.join(note.split())}" for note in result.notes),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def verdict(result: Report) -> str:
    """One paragraph in plain words: what is accepted, whether the prediction held, faster or slower."""
    best = headline(result)
    if best is None:
        return "**Nothing was measured live**, so nothing can be said about this draft in serving."
    sentences = [_accepts(result, best), agreement(result)]
    if speculates(best.acceptance):
        sentences += _speed_sentences(result)
    else:
        sentences.append(_cost_of_nothing(result))
    looping = max(item.looping for item in result.evaluation.measured)
    if looping >= LOOPING:
        sentences.append(f"Up to {percent(looping)} of the answers fall into repetition, which flatters these figures.")
    return " ".join(sentence for sentence in sentences if sentence)


def acceptance_table(result: Report) -> Rows:
    """One row a measurement: the prediction, then live ones; all values are text to be shown."""
    evaluation = result.evaluation
    depth = max(len(item.by_position) for item in (evaluation.predicted.acceptance, *_live_acceptances(result)))
    rows = [_acceptance_row("predicted, held-out prompts", "", evaluation.predicted.acceptance, depth, "")]
    for item in evaluation.measured:
        label = f"live, {PROMPTS[item.prompts]}"
        flight = in_flight(item.draft, item.concurrency)
        rows.append(_acceptance_row(label, flight, item.acceptance, depth, percent(item.looping)))
    return rows


def speed_table(result: Report) -> Rows:
    """Two rows a measurement, without and with the draft."""
    rows: Rows = []
    for item in result.evaluation.measured:
        rows.append(_speed_row(item, "without", item.plain, ""))
        rows.append(_speed_row(item, "with", item.draft, f"{ratio(item):.2f} x{between(item.speed_up, 2)}"))
    return rows


def steps_table(result: Report) -> Rows:
    """One row a step of this run: time, whether its work was there, whole or in part, and detail."""
    return [
        {
            "step": step.step,
            "time": duration(step.seconds),
            "reused": "yes" if step.reused else "in part" if step.resumed else "no",
            "key": step.key,
            "detail": step.detail,
        }
        for step in result.steps
    ]


def left_out_table(result: Report) -> Rows:
    """One row a kind of record that was not used, or not with all that it carries; examples say where they lie."""
    return [
        {
            "prompts": item.prompts,
            "records": f"{item.count:,} of {item.read:,}",
            "why": f"used without {item.kind}" if item.used else f"left out: {item.kind}",
            "examples": ", ".join(item.examples),
        }
        for item in result.left_out
    ]


def plan_table(result: Report) -> Rows:
    """Disk and time: planned, used, and how far apart."""
    return [
        {
            "what": "disk",
            "planned": size(result.planned_disk_bytes),
            "used": size(result.used_disk_bytes),
            "used / planned": _share(result.used_disk_bytes, result.planned_disk_bytes),
        },
        {
            "what": "time",
            "planned": duration(result.planned_seconds),
            "used": duration(result.used_seconds),
            "used / planned": _share(result.used_seconds, result.planned_seconds),
        },
    ]


def provenance_table(result: Report) -> Rows:
    """What the draft comes from: target, engine, taps, versions."""
    facts = {
        "target": f"{result.target}, revision {result.target_revision}",
        "states from": f"{result.engine} {result.engine_version}, taps {', '.join(map(str, result.taps))}",
        "served by": f"{result.evaluation.engine} {result.evaluation.engine_version}",
        **result.sampling,
        "published": result.published,
        **result.versions,
    }
    return [{"what": name, "value": value} for name, value in facts.items()]


def live_table(points: Sequence[TrainPoint], last: int = 20) -> Rows:
    """The latest training points, newest first, while training runs.

    Args:
        points: points logged so far, oldest first.
        last: at most so many rows.
    """
    shown = list(points)[-last:][::-1]
    depth = max((len(point.accuracy) for point in shown), default=0)
    return [
        {"step": str(point.step), "loss": f"{point.loss:.3f}"}
        | {f"accuracy at draft step {place}": _at(point.accuracy, place) for place in range(depth)}
        for point in shown
    ]


def _accepts(result: Report, best: Measured) -> str:
    found, drafts = best.acceptance, result.evaluation.drafts
    where = f"{found.prompts} {PROMPTS[best.prompts]}"
    served = f"{result.evaluation.engine} {result.evaluation.engine_version}"
    if not speculates(found):
        return (
            f"**No speculation: on {where} {served} accepted not one of the tokens this draft proposed "
            f"(acceptance length {found.length:.2f}).** Either the draft is not used at all, or it was trained on "
            "states other than those it is served."
        )
    text = (
        f"**On {where}, {served} gets {found.length:.3f} tokens from a step of the target** "
        f"(95 % interval {found.interval[0]:.3f} to {found.interval[1]:.3f}) with {_drafted(found, drafts)} at a time"
    )
    other = result.live("heldout")
    if other is not None and other is not best:
        text += f"; on {other.acceptance.prompts} held-out prompts of the training kind {length(other.acceptance)}"
    return text + "."


def _drafted(found: Acceptance, asked: int) -> str:
    """How many tokens were drafted at a time; by the engine's count where that is not what was asked for."""
    if found.drafted is None or abs(found.drafted / asked - 1) <= SAME_DRAFTS:
        return f"{asked} drafted"
    return f"{found.drafted:.2f} drafted ({asked} were asked for)"


def _speed_sentences(result: Report) -> list[str]:
    sentences = []
    for item in speed_runs(result):
        with_draft, plain = item.draft.tokens_per_second, item.plain.tokens_per_second
        change = ratio(item) - 1
        most = most_in_flight(item)
        flight = f"With up to {most} requests in flight" if most > 1 else "With 1 request in flight"
        if most < item.concurrency:
            flight += f" ({item.concurrency} were asked for)"
        rates = f"{with_draft:,.0f} tokens/s with it against {plain:,.0f} without"
        low, high = item.speed_up or (ratio(item), ratio(item))
        if low < 1 < high:
            sentences.append(
                f"{flight} repeated runs tell no difference in speed: {rates}, {ratio(item):.2f} x"
                f"{between(item.speed_up, 2)}."
            )
        elif abs(change) <= SAME_SPEED:
            sentences.append(f"{flight} the draft makes no difference to speed: {rates}.")
        elif change > 0:
            sentences.append(f"{flight} the draft makes serving **faster by {percent(change, 0)}**: {rates}.")
        else:
            sentences.append(f"{flight} the draft makes serving **slower by {percent(-change, 0)}**: {rates}.")
    return sentences


def _cost_of_nothing(result: Report) -> str:
    run = speed_runs(result)[0]
    return (
        f"It costs time and gives nothing: {run.draft.tokens_per_second:,.0f} tokens/s with it "
        f"against {run.plain.tokens_per_second:,.0f} without."
    )


def _live_acceptances(result: Report) -> list[Acceptance]:
    return [item.acceptance for item in result.evaluation.measured]


def _acceptance_row(label: str, flight: str, found: Acceptance, depth: int, looping: str) -> dict[str, str]:
    return {
        "measured": label,
        "in flight": flight,
        "acceptance length": length(found),
        **{f"position {place}": _at(found.by_position, place) for place in range(depth)},
        "starts": f"{found.starts:,}",
        "prompts": f"{found.prompts:,}",
        "looping": looping,
    }


def _speed_row(item: Measured, draft: str, speed: Speed, speed_up: str) -> dict[str, str]:
    return {
        "prompts": PROMPTS[item.prompts],
        "in flight": in_flight(speed, item.concurrency),
        "draft": draft,
        "tokens/s": f"{speed.tokens_per_second:,.1f}{between(speed.interval, 1)}",
        "speed-up": speed_up,
        "TTFT, ms": f"{milliseconds(speed.first_token_p50)} / {milliseconds(speed.first_token_p95)}",
        "ITL, ms": " / ".join(milliseconds(seconds) for seconds in between_tokens(speed)),
    }


def _steady(result: Report) -> str:
    sides = [side for item in result.evaluation.measured for side in (item.plain, item.draft)]
    if any(side.steady_seconds is None for side in sides):
        return ""
    text = (
        "All figures are of the steady state, without ramp-up and drain. In brackets is the 95 % interval over "
        "repeated runs. "
    )
    if any(side.steady_seconds == 0 for side in sides):
        text += "Where too few prompts left no steady state, the whole run is counted. "
    return text


def _layout(result: Report) -> str:
    if result.evaluation.layout == "interleaved":
        return "Both servers were up together and were measured in turn."
    return "The servers did not run together; launches went without, with, with, without."


def _training(result: Report) -> str:
    training = result.training
    text = (
        f"{training.steps:,} steps in {training.epochs} epochs over {training.tokens:,} tokens, "
        f"{duration(training.seconds)}, by speculators {training.trainer_version}; "
        f"the draft can propose {training.draft_vocab_size:,} tokens"
    )
    covered = training.coverage
    text += "." if covered is None else f", {percent(covered)} of those that the training answers hold."
    if training.start:
        text += f" It started from the draft {training.start}."
    if training.resumed:
        text += f" Training was interrupted and taken up again {_times(training.resumed)}."
    if training.validation:
        joint = " / ".join(percent(share) for share in training.validation[-1].accuracy)
        text += (
            f" At the end the held-out samples give {joint} joint accuracy at draft steps 0, 1, ...; an average over "
        )
        text += "all positions, it is no prediction of acceptance."
    return text


def _counts(result: Report) -> str:
    return table([{"what": name.replace("_", " "), "count": f"{count:,}"} for name, count in result.counts.items()])


def _image(figures: Mapping[str, str], name: str, alt: str) -> str:
    return f"![{alt}]({figures[name]})" if name in figures else ""


def _at(shares: Sequence[float], place: int) -> str:
    return percent(shares[place]) if place < len(shares) else ""


def _share(used: float, planned: float) -> str:
    return percent(used / planned, 0) if planned else ""


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
