"""The parity gate's comparison as a table, a heatmap and sentences."""

from infra.report.heatmap import heatmap
from infra.report.wording import percent
from infra.results import Parity, TapParity

Rows = list[dict[str, str]]


def parity_table(found: Parity) -> Rows:
    """One row a tap; all values are text to be shown."""
    return [
        {
            "tap": _name(found, tap),
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
        [_name(found, tap) for tap in found.taps],
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
        f"sequences; {tokens}. Errors are relative, by token; the final state is compared after the norm. Bounds are "
        f"{known}. The final states lead to the same token at {percent(found.argmax)} of {found.argmax_counted} "
        f"positions ({found.near_ties} near-ties apart)."
    )


def _name(found: Parity, tap: TapParity) -> str:
    return f"final ({tap.tap})" if tap.tap == found.layers else str(tap.tap)
