"""Acceptance length: tokens emitted per target step, the bonus token included (1.0 = no speculation)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.errors import GateError


@dataclass(frozen=True)
class ChainCounts:
    """Counts of one or many chains of drafts.

    Args:
        starts: how often a chain was drafted.
        accepted: by position in the chain, how often that draft was accepted.
    """

    starts: int
    accepted: tuple[int, ...]

    @property
    def length(self) -> float:
        """Tokens per target step; nan when nothing was drafted."""
        return 1.0 + sum(self.accepted) / self.starts if self.starts else float("nan")

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of the chains whose draft at each position was accepted; nan when nothing was drafted."""
        return tuple(count / self.starts if self.starts else float("nan") for count in self.accepted)


@dataclass(frozen=True)
class Interval:
    """A bootstrap interval of an acceptance length."""

    low: float
    high: float
    level: float


@dataclass(frozen=True)
class Comparison:
    """What was predicted against what was served; ``relative`` is (live - predicted) / predicted."""

    predicted: float
    live: float
    relative: float
    tolerance: float

    @property
    def close(self) -> bool:
        """Whether live lies within the tolerance."""
        return abs(self.relative) <= self.tolerance


def pooled(parts: Sequence[ChainCounts]) -> ChainCounts:
    """The counts of all parts together.

    Raises:
        ValueError: the parts' chains have different lengths, or there are none.
    """
    if not parts or len({len(part.accepted) for part in parts}) != 1:
        raise ValueError("acceptance counts of chains of one length are needed")
    totals = tuple(sum(column) for column in zip(*(part.accepted for part in parts), strict=True))
    return ChainCounts(sum(part.starts for part in parts), totals)


def bootstrap(parts: Sequence[ChainCounts], *, seed: int = 0, resamples: int = 2000, level: float = 0.95) -> Interval:
    """Interval of the pooled acceptance length when the prompts are drawn again, with replacement.

    Args:
        parts: counts of one prompt each.
        seed: the same seed gives the same interval.
        resamples: draws.
        level: share of the draws inside.
    """
    starts = np.array([part.starts for part in parts], dtype=np.float64)
    accepted = np.array([sum(part.accepted) for part in parts], dtype=np.float64)
    if starts.sum() == 0:
        raise ValueError("nothing was drafted")
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(parts), size=(resamples, len(parts)))
    drafted = starts[draws].sum(axis=1)
    lengths = 1.0 + np.divide(accepted[draws].sum(axis=1), drafted, out=np.zeros(resamples), where=drafted > 0)
    low, high = np.quantile(lengths, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level)


def compare(predicted: ChainCounts, live: ChainCounts, tolerance: float) -> Comparison:
    """Live against predicted acceptance length."""
    return Comparison(predicted.length, live.length, (live.length - predicted.length) / predicted.length, tolerance)


def serving_gate(predicted: ChainCounts, live: ChainCounts, tolerance: float) -> Comparison:
    """Stop unless serving does what the held-out states say it should.

    Raises:
        GateError: nothing was drafted, nothing was accepted, or live is further than ``tolerance`` from predicted.
    """
    if live.starts == 0:
        raise GateError("serving", "the engine drafted nothing", fix="read the engine's log")
    if sum(live.accepted) == 0:
        raise GateError(
            "serving",
            f"acceptance length is exactly 1.00 over {live.starts} chains",
            expected=f"about {predicted.length:.3f}",
            fix="check that the engine runs the draft with the method eagle3",
        )
    comparison = compare(predicted, live, tolerance)
    if not comparison.close:
        raise GateError(
            "serving",
            f"acceptance length is {live.length:.3f} in serving, {comparison.relative:+.1%} from the prediction",
            expected=f"{predicted.length:.3f} within {100 * tolerance:.0f} %",
            fix="compare the serving engine's taps with the training ones: a layer off by one looks like this",
        )
    return comparison
