"""Acceptance length, its interval, and the serving gate."""

import math

import pytest

from infra.drafter.acceptance import ChainCounts, bootstrap, compare, pooled, serving_gate
from infra.errors import GateError


def test_length_counts_the_bonus_token() -> None:
    counts = ChainCounts(100, (60, 30, 10))
    assert counts.length == 2.0
    assert counts.by_position == (0.6, 0.3, 0.1)
    assert math.isnan(ChainCounts(0, (0, 0)).length)


def test_pooling_weighs_by_starts() -> None:
    assert pooled([ChainCounts(10, (10, 0)), ChainCounts(30, (0, 0))]) == ChainCounts(40, (10, 0))
    with pytest.raises(ValueError, match="chains of one length"):
        pooled([ChainCounts(1, (1,)), ChainCounts(1, (1, 0))])
    with pytest.raises(ValueError, match="chains of one length"):
        pooled([])


def test_the_interval_is_seeded_and_holds_the_pooled_length() -> None:
    parts = [ChainCounts(20, (n % 15, n % 5)) for n in range(60)]
    interval = bootstrap(parts, seed=3)
    assert interval == bootstrap(parts, seed=3)
    assert interval != bootstrap(parts, seed=4)
    assert interval.low < pooled(parts).length < interval.high
    wider = bootstrap(parts, seed=3, level=0.999)
    assert wider.low < interval.low
    assert wider.high > interval.high
    more = bootstrap(parts * 16, seed=3)
    assert (more.high - more.low) < 0.5 * (interval.high - interval.low)


def test_equal_prompts_have_no_spread() -> None:
    interval = bootstrap([ChainCounts(10, (5,))] * 8)
    assert interval.low == interval.high == 1.5


def test_comparison_is_relative_to_the_prediction() -> None:
    comparison = compare(ChainCounts(100, (50, 10)), ChainCounts(200, (104, 20)), 0.05)
    assert (comparison.predicted, comparison.live) == (1.6, 1.62)
    assert comparison.relative == pytest.approx(0.0125)
    assert comparison.close


def test_the_gate_lets_a_close_figure_through() -> None:
    serving_gate(ChainCounts(100, (40,)), ChainCounts(100, (38,)), 0.05)


@pytest.mark.parametrize(
    ("live", "said"),
    [
        (ChainCounts(0, (0, 0)), "drafted nothing"),
        (ChainCounts(50, (0, 0)), "exactly 1.00 over 50 chains"),
        (ChainCounts(100, (20, 5)), "1.250 in serving, -21.9% from the prediction"),
        (ChainCounts(100, (70, 50)), "2.200 in serving, \\+37.5% from the prediction"),
    ],
)
def test_the_gate_stops(live: ChainCounts, said: str) -> None:
    with pytest.raises(GateError, match=said) as caught:
        serving_gate(ChainCounts(100, (45, 15)), live, 0.05)
    assert caught.value.gate == "serving"
