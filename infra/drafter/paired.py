"""Step by step: what the walk predicts for a step of the target against what serving got there.

A served answer parts from the stored one sooner or later, and from then on both are other texts with other acceptance.
Up to there the tokens are the same, so the walk knows what each served step should have brought.

What tells wrong states from right ones is how many steps differ, not by how much on average: with layers off by one
some steps bring more and others less, and the mean may hide it. Most steps of a weak draft bring nothing either way
and say nothing, so the share is taken of those where walk or serving had a draft accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from infra.drafter.acceptance import ratio_interval
from infra.results import Paired

LEAST_ACTIVE = 100
"""Fewer compared steps with an accepted draft say too little."""
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
        active: of these, steps where the walk, or serving, has a draft accepted.
        differing: steps where the two numbers of accepted drafts differ.
        predicted: drafts that the walk says these steps get accepted.
        served: drafts that they got.
    """

    stored: int
    shared: int
    steps: int
    active: int
    differing: int
    predicted: int
    served: int


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
    known, compared = pieces[0], list[tuple[int, int]]()
    for size in pieces[1:]:
        if known + drafts + 1 > shared:
            break
        if size <= drafts + 1:  # a larger one is several steps
            compared.append((accepted[known - 1], size - 1))
        known += size
    return PairedAnswer(
        stored=len(stored),
        shared=shared,
        steps=len(compared),
        active=sum(any(step) for step in compared),
        differing=sum(predicted != got for predicted, got in compared),
        predicted=sum(predicted for predicted, _ in compared),
        served=sum(got for _, got in compared),
    )


def compare_steps(answers: Sequence[PairedAnswer], *, pieces: int, counted: int, bound: float) -> Paired:
    """All answers together; says why when they cannot be judged.

    Args:
        answers: one for each prompt.
        pieces: pieces of all streams after their first ones.
        counted: steps with drafts that the engine counted over the same answers.
        bound: share of the active steps that may differ.
    """
    told = [answer for answer in answers if answer.steps]
    steps, active = sum(answer.steps for answer in told), sum(answer.active for answer in told)
    differing, more = [answer.differing for answer in told], [answer.served - answer.predicted for answer in told]
    return Paired(
        prompts=len(told),
        steps=steps,
        active=active,
        stored_tokens=sum(answer.stored for answer in answers),
        shared_tokens=sum(answer.shared for answer in answers),
        differing=sum(differing) / active if active else 0.0,
        differing_interval=ratio_interval(differing, [answer.active for answer in told]) if active else (0.0, 1.0),
        difference=sum(more) / steps if steps else 0.0,
        difference_interval=ratio_interval(more, [answer.steps for answer in told]) if steps else (0.0, 0.0),
        same=1.0 - sum(differing) / steps if steps else 0.0,
        bound=bound,
        pieces=pieces,
        counted=counted,
        why_not=_why_not(len(told), active, pieces, counted),
    )


def _why_not(prompts: int, active: int, pieces: int, counted: int) -> str:
    if abs(counted - pieces) > MOST_JOINED * counted:
        return f"the engine counted {counted:,} steps and the stream came in {pieces:,} pieces"
    if active < LEAST_ACTIVE or prompts < LEAST_PROMPTS:
        return (
            f"on the tokens that served and stored answers share, only {active:,} steps of {prompts} prompts have a "
            f"draft accepted ({LEAST_ACTIVE} of {LEAST_PROMPTS} are needed)"
        )
    return ""
