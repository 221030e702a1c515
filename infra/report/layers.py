"""What the convention and the parity gate measured, as tables, heatmaps and sentences."""

from infra.report.figures import heatmap
from infra.report.wording import percent
from infra.results import Convention, Parity

Rows = list[dict[str, str]]
REACH = 2
"""How many neighbouring taps to either side the table shows."""


def layers_table(found: Convention) -> Rows:
    """One row a slot: its median error at its own tap and at the neighbours; all values are text to be shown."""
    rows = []
    for slot, errors in enumerate(found.medians):
        tap = found.taps[slot]
        cells = {
            f"k{step:+d}" if step else "k": f"{errors[tap + step]:.4f}" if 0 <= tap + step < len(errors) else ""
            for step in range(-REACH, REACH + 1)
        }
        rows.append({"tap k": _name(found, tap), **cells, "k / nearer neighbour": f"{found.ratios[slot]:.3f}"})
    return rows


def layers_figure(found: Convention) -> bytes | None:
    """Median error of each slot against each tap of the reference, as PNG; None when there was no reference."""
    if not found.medians:
        return None
    return heatmap(
        found.medians,
        [_name(found, tap) for tap in found.taps],
        [str(tap) for tap in range(found.layers + 1)],
        f"What {found.engine} captured, against each layer of the target: relative error",
        "tap of the reference",
    )


def layers_text(found: Convention, parity: Parity | None = None) -> str:
    """One paragraph: what was measured, or what stands in where nothing could be."""
    own = f"{found.own_agreed} of {found.own_counted} prompts"
    if not found.reference:
        return _without(found, own, parity)
    verdict = (
        f"**{found.engine} does not capture what it was asked for: {found.fault}.**"
        if found.fault
        else f"{found.engine} captures the taps it was asked for."
    )
    return (
        f"{verdict} Compared with the target in transformers ({found.reference}) on {found.tokens:,} tokens of "
        f"{found.prompts} samples: medians of the relative error by token, the final state post-norm; a tap's own "
        f"error is at most {max(found.ratios):.2g} of the nearer neighbour's (bound 0.2). The final states lead to the "
        f"reference's token at {_share(found.argmax_agreed, found.argmax_counted)} of {found.argmax_counted} positions "
        f"({found.near_ties} near-ties apart), and to the engine's own next token in {own}."
    )


def _without(found: Convention, own: str, parity: Parity | None) -> str:
    here = f"here in {own}, and " if found.prompts else ""
    other = (
        f"the parity gate compared all taps with {parity.serving}"
        if parity
        else "no other engine computed them, so the taps below the last layer rest on the table of layer ids alone"
    )
    return (
        f"**The layers that {found.engine} captures were not compared with a reference**: {found.why}. What checks "
        f"them instead: the final state's logits against the engine's own next tokens ({here}by the capture gate "
        f"during the extraction); {other}."
    )


def _share(agreed: int, counted: int) -> str:
    return percent(agreed / counted) if counted else "none"


def parity_table(found: Parity) -> Rows:
    """One row a tap; all values are text to be shown."""
    return [
        {
            "tap": _name(found, tap.tap),
            "median": f"{tap.median:.4f}",
            "bound": f"{tap.bound:.3f}",
            "99 %": f"{tap.p99:.3f}",
            "worst": f"{tap.worst:.3f}",
            "worst at": tap.worst_at,
            "nearest layer": "" if tap.neighbour is None else f"{tap.neighbour:.3f}",
            "seen": tap.seen,
        }
        for tap in found.taps
    ]


def parity_figure(found: Parity) -> bytes:
    """Median error by tap and by position in the sequence, as PNG."""
    return heatmap(
        [tap.by_position for tap in found.taps],
        [_name(found, tap.tap) for tap in found.taps],
        [str(number * found.stretch) for number in range(len(found.taps[0].by_position))],
        f"{found.serving} against {found.extracting}: relative error",
        "position in the sequence, tokens",
    )


def parity_text(found: Parity) -> str:
    """One paragraph: what was compared, and how far apart the engines are."""
    shares = {f"{tap.bound / tap.neighbour:.1g}" for tap in found.taps if tap.neighbour}
    known = f"{', '.join(shares)} of the distance to the nearest layer" if shares else "fixed, for want of a reference"
    tokens = found.tokeniser_fault or (
        f"both tokenise {found.conversations} conversations as the target's own template does"
    )
    return (
        f"{found.serving} against {found.extracting} on the same {found.tokens:,} tokens in {found.sequences} "
        f"sequences; {tokens}. Errors are relative, by token; the final state is compared post-norm. Bounds are "
        f"{known}. The final states lead to the same token at {percent(found.argmax)} of {found.argmax_counted} "
        f"positions ({found.near_ties} near-ties apart)."
    )


def _name(found: Convention | Parity, tap: int) -> str:
    return f"final ({tap})" if tap == found.layers else str(tap)
