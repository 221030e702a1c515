"""Step by step: what the walk predicts for a step of the target against what serving got there.

A served answer parts from the stored one sooner or later, and from then on both are other texts with other acceptance.
Up to there the tokens are the same, so the walk knows what each served step should have brought.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from infra.drafter.acceptance import ratio_interval
from infra.results import Paired

LEAST_STEPS = 200
"""Fewer compared steps than this say too little."""
LEAST_PROMPTS = 5
MOST_JOINED = 0.02
"""Share of the engine's steps that the stream may have joined: two in one piece look like one step that got more."""


@dataclass(frozen=True)
class PairedAnswer:
    """One served answer beside its stored one.

    Args:
        stored: tokens of the stored answer.
        shared: tokens from its start that the served answer has, too.
        steps: served steps that are compared.
        predicted: drafts that the walk says these steps get accepted.
        served: drafts that they got.
        same: steps where the two are equal.
    """

    stored: int
    shared: int
    steps: int
    predicted: int
    served: int
    same: int


def pair(
    stored: Sequence[int], accepted: Sequence[int], served: Sequence[int], pieces: Sequence[int], drafts: int
) -> PairedAnswer:
    """Compare the steps of a served answer with the walk over the stored one.

    A step is compared if the answers are equal as far as it could have reached. Whether it is compared does not depend
    on how far it did reach, so this choice favours neither side.

    Args:
        stored: token ids of the stored answer.
        accepted: what :func:`infra.drafter.walk.accepted_from` found for it.
        served: token ids of the served answer.
        pieces: tokens of each piece of its stream: the first one is the prompt's, each other one is a step.
        drafts: tokens drafted a step.
    """
    shared = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(stored, served, strict=False)))
    known, steps, predicted, got, same = pieces[0], 0, 0, 0, 0
    for size in pieces[1:]:
        if known + drafts + 1 > shared:
            break
        if size <= drafts + 1:  # a larger one is several steps
            expected = accepted[known - 1]
            steps, predicted, got = steps + 1, predicted + expected, got + size - 1
            same += size - 1 == expected
        known += size
    return PairedAnswer(len(stored), shared, steps, predicted, got, same)


def compare_steps(answers: Sequence[PairedAnswer], *, pieces: int, counted: int, bound: float) -> Paired:
    """All answers together; says why when they cannot be judged.

    Args:
        answers: one for each prompt.
        pieces: pieces of all streams after their first ones.
        counted: steps with drafts that the engine counted over the same answers.
        bound: how far the mean difference may lie from 0, accepted drafts a step.
    """
    told = [answer for answer in answers if answer.steps]
    steps = sum(answer.steps for answer in told)
    difference = [answer.served - answer.predicted for answer in told]
    return Paired(
        prompts=len(told),
        steps=steps,
        stored_tokens=sum(answer.stored for answer in answers),
        shared_tokens=sum(answer.shared for answer in answers),
        predicted=sum(answer.predicted for answer in told) / steps if steps else 0.0,
        served=sum(answer.served for answer in told) / steps if steps else 0.0,
        interval=ratio_interval(difference, [answer.steps for answer in told]) if steps else (0.0, 0.0),
        same=sum(answer.same for answer in told) / steps if steps else 0.0,
        bound=bound,
        pieces=pieces,
        counted=counted,
        why_not=_why_not(len(told), steps, pieces, counted),
    )


def _why_not(prompts: int, steps: int, pieces: int, counted: int) -> str:
    if abs(counted - pieces) > MOST_JOINED * counted:
        return f"the engine counted {counted:,} steps and the stream came in {pieces:,} pieces"
    if steps < LEAST_STEPS or prompts < LEAST_PROMPTS:
        return (
            f"served and stored answers share the tokens of only {steps:,} steps of {prompts} prompts "
            f"({LEAST_STEPS} of {LEAST_PROMPTS} are needed)"
        )
    return ""
