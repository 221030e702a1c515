"""How the report's numbers are picked out and put into words; shared by figures, markdown and model card."""

from collections.abc import Mapping, Sequence

from infra.results import Acceptance, Measured, Report, Speed

PROMPTS = {"heldout": "held-out prompts", "evaluation": "evaluation prompts"}
SAME_SPEED = 0.02
"""Relative difference of throughput below which the report speaks of neither faster nor slower."""


def headline(report: Report) -> Measured | None:
    """The measurement the round is judged by: evaluation prompts first, held-out ones otherwise."""
    return report.live("evaluation") or report.live("heldout")


def speed_runs(report: Report) -> list[Measured]:
    """The measurements that show speed by concurrency, ascending: those of the headline's kind of prompts."""
    best = headline(report)
    if best is None:
        return []
    return sorted((item for item in report.evaluation.measured if item.prompts == best.prompts), key=_asked)


def speculates(acceptance: Acceptance) -> bool:
    """Whether any drafted token was accepted."""
    return acceptance.length > 1.0


def ratio(item: Measured) -> float:
    """Throughput with the draft over throughput without it."""
    return item.draft.tokens_per_second / item.plain.tokens_per_second


def most_in_flight(item: Measured) -> int:
    """Most requests that were in flight at once in both runs of a measurement; what was asked for bounds an old one."""
    counted = [side.most_in_flight for side in (item.plain, item.draft) if side.most_in_flight is not None]
    return min(counted, default=item.concurrency)


def in_flight(speed: Speed, asked: int) -> str:
    """Requests in flight as a table says them: ``64, mean 48.2`` or ``20 of 64 asked for, mean 15.1``."""
    if speed.most_in_flight is None or speed.mean_in_flight is None:
        return f"up to {asked}"
    most = f"{speed.most_in_flight}" + (f" of {asked} asked for" if speed.most_in_flight < asked else "")
    return f"{most}, mean {speed.mean_in_flight:.1f}" if asked > 1 else most


def percent(share: float, digits: int = 1) -> str:
    """``0.336`` as ``33.6 %``."""
    return f"{100 * share:.{digits}f} %"


def length(acceptance: Acceptance) -> str:
    """Acceptance length with its interval: ``1.416 (1.380 to 1.451)``."""
    low, high = acceptance.interval
    return f"{acceptance.length:.3f} ({low:.3f} to {high:.3f})"


def between(interval: tuple[float, float] | None, digits: int) -> str:
    """An interval behind a figure: `` (0.98 to 1.12)``; empty when there is none."""
    return f" ({interval[0]:,.{digits}f} to {interval[1]:,.{digits}f})" if interval is not None else ""


def between_tokens(speed: Speed) -> list[float]:
    """Time between tokens by percentile, seconds: 50th, 95th, and the 99th where it was kept."""
    found = [speed.between_tokens_p50, speed.between_tokens_p95]
    return found if speed.between_tokens_p99 is None else [*found, speed.between_tokens_p99]


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds with three significant digits or so: ``4.07``, ``41.2``, ``1,240``."""
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """A markdown table; the first row's keys are the columns. Empty text if there are no rows."""
    if not rows:
        return ""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(cell(item) for item in line)} |" for line in lines)


def cell(text: str) -> str:
    """Text that stays inside one cell of a markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _asked(item: Measured) -> int:
    return item.concurrency
