"""What a training falls short of, by what was measured, and what more data should buy: advice, never a refusal.

The figures are of docs/recipes.md: 7,000 prompts for SmolLM2-135M on one H200, speculators 0.9, drafts served by vLLM.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

from infra.config.round import RoundConfig, TargetShape
from infra.round.needs import draft_size, longest_sample, optimiser_steps, steps_an_epoch, tokens_seen

MEASURED = "measured on one H200 with SmolLM2-135M"
CURVE = ((1000, 1.765), (2000, 2.174), (4000, 2.411), (7000, 2.5))
"""(prompts, acceptance length with 3 drafts at temperature 0): one answer each, 10 epochs, otherwise the same."""
STEPS = 9000
"""Optimiser steps that the best drafts had at least."""
TOKENS_A_PARAMETER = 3.0
"""Tokens, every epoch counted, for each trained parameter: the good drafts had 3.2 to 4.8."""


def recipe_notes(config: RoundConfig, shape: TargetShape, prompts: int, tokens: int) -> Iterator[str]:
    """What the plan says of a round's training.

    Args:
        prompts: how many there are.
        tokens: of all samples, held-out ones too.
    """
    if not config.train.start:  # a draft that was trained before needs less
        yield from _undertrained(config, shape, tokens)
    if (longest := longest_sample(config)) > config.train.sequence_tokens:
        yield (
            f"samples have up to {longest:,} tokens, and training cuts what is beyond train.sequence_tokens "
            f"({config.train.sequence_tokens:,})"
        )
    yield f"twice the prompts ({2 * prompts:,}) should add {_gain(prompts)} to the acceptance length ({MEASURED})"


def _undertrained(config: RoundConfig, shape: TargetShape, tokens: int) -> Iterator[str]:
    steps = optimiser_steps(config, tokens)
    if steps < STEPS:
        epochs = math.ceil(STEPS / steps_an_epoch(config, tokens))
        field = f"train.epochs to {epochs}" + (", and lift train.max_steps" if config.train.max_steps else "")
        yield (
            f"undertrained: {steps:,} optimiser steps, and the best drafts had {STEPS:,} or more ({MEASURED}): raise "
            f"{field}, or ask for more answers (generate.further_temperatures)"
        )
    trained, _ = draft_size(config, shape)
    share = tokens_seen(config, tokens) / trained
    if share < TOKENS_A_PARAMETER:
        yield (
            f"undertrained: {share:.2g} tokens for each of {trained / 1e6:,.0f}M trained parameters, every epoch "
            f"counted, and good drafts had {TOKENS_A_PARAMETER:g} or more ({MEASURED}): take more prompts, answers or "
            "epochs, or fewer train.layers"
        )


def _gain(prompts: int) -> str:
    """What twice as many prompts add, in words; outside the curve only a bound is known."""
    first, last = CURVE[0][0], CURVE[-1][0]
    if prompts < first:
        return f"{_length(2 * first) - _length(first):.2f} or more"
    if prompts > last / 2:
        return f"{_slope(*CURVE[-2], *CURVE[-1]):.2f} at most"
    return f"about {_length(2 * prompts) - _length(prompts):.2f}"


def _length(prompts: int) -> float:
    """Acceptance length on the curve, straight between its points over the logarithm of the prompts."""
    for (fewer, low), (more, high) in pairwise(CURVE):
        if fewer <= prompts <= more:
            return low + _slope(fewer, low, more, high) * math.log2(prompts / fewer)
    raise ValueError(f"{prompts} prompts are not on the curve")


def _slope(fewer: int, low: float, more: int, high: float) -> float:
    """Acceptance length for each doubling."""
    return (high - low) / math.log2(more / fewer)
