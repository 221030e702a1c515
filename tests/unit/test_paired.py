"""Served steps beside the walk's prediction for them, and the gate that they decide."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from infra.drafter.acceptance import ChainCounts, serving_gate
from infra.drafter.paired import PairedAnswer, compare_steps, pair
from infra.drafter.walk import Steps, WalkedSample, WalkResult, walk_chain
from infra.engines.client.bench import Run
from infra.engines.client.counters import SpecCounters
from infra.engines.client.load import Timed
from infra.errors import GateError
from infra.results import Paired
from infra.round.context import RoundContext
from infra.steps.evaluate import pair_runs
from infra.store.samples import Sample

DRAFTS = 3
TOTALS = ChainCounts(1000, (300, 100, 50))


def test_steps_are_compared_at_the_places_where_they_began() -> None:
    stored = list(range(100, 112))
    accepted = [2, 0, 0, 1, 0, 3, 0, 0, 2, 1, 0]
    # 1 token, then steps of 3, 2, 1 and 2: they begin when 1, 4, 6 and 7 tokens are known.
    found = pair(stored, accepted, stored[:9], [1, 3, 2, 1, 2], DRAFTS)
    # The last two could have reached the 10th token and beyond, which the served answer does not have.
    assert found == PairedAnswer(stored=12, shared=9, steps=2, active=2, differing=0, predicted=2 + 1, served=2 + 1)


def test_what_comes_after_the_answers_part_is_not_compared() -> None:
    stored, accepted = [1, 2, 3, 4, 5, 6, 7, 8], [0] * 7
    found = pair(stored, accepted, [1, 2, 3, 4, 5, 9, 9, 9], [1, 2, 4, 1], DRAFTS)
    assert (found.shared, found.steps, found.active, found.differing, found.served) == (5, 1, 1, 1, 1)
    assert pair(stored, accepted, [9, 2, 3], [1, 2], DRAFTS).steps == 0


def test_a_piece_of_more_tokens_than_a_step_can_bring_is_left_out() -> None:
    stored = list(range(20))
    found = pair(stored, [1] * 19, stored, [1, 2, 6, 2, 2], DRAFTS)
    assert (found.steps, found.active, found.differing) == (3, 3, 0), "places are still known behind it"


def answers(share: float, prompts: int = 40, active: int = 12) -> list[PairedAnswer]:
    """Prompts of 50 steps, of whose active ones this share differs; as many bring more as bring less."""
    rng = np.random.default_rng(1)
    differing = rng.binomial(active, share, size=prompts)
    more = rng.integers(-1, 2, size=prompts)
    return [
        PairedAnswer(100, 80, 50, active, int(count), 12, 12 + int(min(count, 1) * change))
        for count, change in zip(differing, more, strict=True)
    ]


def compared(share: float, prompts: int = 40, active: int = 12, **more: int) -> Paired:
    counts = {"pieces": prompts * 50, "counted": prompts * 50} | more
    return compare_steps(answers(share, prompts, active), bound=0.1, **counts)


@pytest.mark.parametrize("share", [0.0, 0.04])
def test_right_ids_pass_whatever_the_totals_say(share: float) -> None:
    found = compared(share)
    assert (found.why_not, found.shared, found.steps, found.active) == ("", 0.8, 2000, 480)
    assert found.differing_interval[0] <= found.differing <= found.differing_interval[1] < 0.1
    serving_gate(TOTALS, ChainCounts(1000, (400, 200, 90)), 0.05, found)


def test_steps_that_differ_stop_though_totals_and_means_agree() -> None:
    found = compared(0.25)
    assert found.difference_interval[0] < 0 < found.difference_interval[1]
    with pytest.raises(GateError, match=r"\d+\.\d% of the steps that have a draft accepted .* same tokens") as caught:
        serving_gate(TOTALS, TOTALS, 0.05, found)
    assert caught.value.gate == "serving"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (compared(0.3, active=2), "only 80 steps of 40 prompts have a draft accepted"),
        (compared(0.3, prompts=3, active=50), "only 150 steps of 3 prompts"),
        (compared(0.3, counted=2100), "the engine counted 2,100 steps and the stream came in 2,000 pieces"),
        (compare_steps([PairedAnswer(9, 0, 0, 0, 0, 0, 0)], pieces=0, counted=0, bound=0.1), "only 0 steps"),
    ],
)
def test_where_the_steps_say_too_little_the_totals_decide(found: Paired, why: str) -> None:
    assert why in found.why_not
    serving_gate(TOTALS, TOTALS, 0.05, found)
    with pytest.raises(GateError, match="from the prediction"):
        serving_gate(TOTALS, ChainCounts(1000, (600, 300, 200)), 0.05, found)


def test_each_served_answer_is_paired_with_the_sample_that_was_asked() -> None:
    """Served in another order, one of them twice; a sample that the walk left out is not compared."""
    accepted = (1, 0) * 20
    answer = list(range(100, 141))
    samples = [
        Sample(row, f"s{row}", [], [row, 9, *answer], [0, 0] + [1] * 41, "heldout", "length", "vllm", {})
        for row in range(3)
    ]
    steps = Steps((0,) * 3, (0,) * 3, (0,) * 3)
    walked = WalkResult(
        tuple(WalkedSample(row, f"s{row}", walk_chain(accepted, DRAFTS), steps, accepted) for row in (0, 1))
    )
    moments = tuple((float(place), 2 if place else 1) for place in range(21))
    served = [Timed((row, 9), answer, 0.0, moments, 20.0, "length") for row in (2, 1, 0, 1)]
    run = Run(served, (0.0, 20.0), 4, SpecCounters(80, 240, 80, (80, 0, 0)), [0.0])
    context = SimpleNamespace(config=SimpleNamespace(evaluate=SimpleNamespace(drafts=DRAFTS, step_tolerance=0.1)))
    found = pair_runs(cast(RoundContext, context), samples, walked, [run])
    # The last two of 20 steps could have reached beyond the answer's 41 tokens.
    assert (found.prompts, found.steps, found.active, found.differing) == (2, 2 * 19, 2 * 19, 0.0)
    assert (found.pieces, found.counted, found.shared) == (80, 80, 1.0)
