"""From answers to samples: what is left out, what is cut, which rows are held out."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from infra.config.round import PrepareConfig
from infra.data.history import OTHER_HISTORY, History
from infra.errors import GateError
from infra.store.answers import GIVEN, Answer
from infra.store.samples import Sample

TOO_LONG = "prompt too long"
"""Reason of an answer that was not asked for, since its prompt is longer than the round takes."""


@dataclass(frozen=True)
class BuildReport:
    """The samples of a round and what became of every answer.

    Attributes:
        samples: in row order.
        answers: how many answers went in.
        truncated: answers cut at the longest answer (they are used all the same).
        empty: answers without a token, left out.
        refused: prompts that the engine refused, left out.
        cut: samples shortened to the longest sample, and kept.
        dropped: other answers left out, by the reason in their ``finish_reason``.
    """

    samples: list[Sample]
    answers: int = 0
    truncated: int = 0
    empty: int = 0
    refused: int = 0
    cut: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


def conversation(sample_id: str) -> str:
    """The prompt id in a sample id (``<prompt id>#<turn>``)."""
    return sample_id.rpartition("#")[0] or sample_id


def with_right_histories(answers: Mapping[str, Answer], history: History) -> list[Answer]:
    """The answers; a later turn whose prompt is not what the target's earlier answers make of it becomes ``dropped``.

    Whatever wrote the answers (an earlier version, say), each prompt is made again here, from the earlier answers'
    token ids, and compared with the one that the target answered.

    Args:
        answers: by sample id.
    """
    return [_with_right_history(answer, answers, history) for answer in answers.values()]


def _with_right_history(answer: Answer, answers: Mapping[str, Answer], history: History) -> Answer:
    if not answer.turn or answer.status != "ok" or answer.engine == GIVEN:
        return answer
    name = conversation(answer.sample_id)
    earlier = [found for turn in range(answer.turn) if (found := answers.get(f"{name}#{turn}"))]
    fault = history.fault(answer, earlier) if len(earlier) == answer.turn else OTHER_HISTORY
    return replace(answer, status="dropped", finish_reason=fault) if fault else answer


def wrong_histories(samples: Sequence[Sample], history: History) -> int:
    """How many stored samples have a prompt that is not what the earlier turns' samples make of it.

    Samples that cannot be compared are not counted: an earlier turn is not there, was cut, or cannot be shown again.
    """
    turns = {sample.sample_id: _answer(sample) for sample in samples if sample.engine != GIVEN}
    wrong = 0
    for answer in turns.values():
        name = conversation(answer.sample_id)
        earlier = [found for turn in range(answer.turn) if (found := turns.get(f"{name}#{turn}"))]
        if answer.turn and len(earlier) == answer.turn:
            wrong += history.fault(answer, earlier) == OTHER_HISTORY
    return wrong


def _answer(sample: Sample) -> Answer:
    """The answer that a sample was made of (its end may be cut off)."""
    start = sample.loss_mask.index(1)
    prompt_ids, answer_ids = sample.input_ids[:start], sample.input_ids[start:]
    turn = int(sample.sample_id.rpartition("#")[2])
    return Answer(
        sample.sample_id,
        sample.messages,
        prompt_ids,
        answer_ids,
        sample.finish_reason,
        sample.engine,
        sample.sampling,
        "ok",
        turn,
    )


def build_samples(answers: Iterable[Answer], config: PrepareConfig, seed: int = 0) -> BuildReport:
    """Samples in row order: training rows first, then held-out rows, each ordered by a hash of seed and conversation.

    All turns of a conversation are on one side. ``round(heldout * conversations)`` of them are held out, at least one
    and not all. Neither split nor order depends on the order of ``answers``.

    Raises:
        GateError: only one conversation is left, so nothing can be held out.
    """
    given = list(answers)
    fates = [_fate(answer, config.max_tokens) for answer in given]
    counts = Counter(kind for kind, _ in fates)
    used = [answer for answer, (kind, _) in zip(given, fates, strict=True) if kind == "used"]
    ranked = sorted({conversation(answer.sample_id) for answer in used}, key=lambda name: _rank(seed, name))
    heldout = set(ranked[: _heldout_count(len(ranked), config.heldout)])
    used.sort(key=lambda answer: _order(answer, seed, heldout))
    return BuildReport(
        samples=[_sample(row, answer, config.max_tokens, heldout) for row, answer in enumerate(used)],
        answers=len(given),
        truncated=sum(answer.finish_reason == "length" for answer in given),
        empty=counts["empty"],
        refused=counts["refused"],
        cut=sum(len(answer.prompt_ids) + len(answer.answer_ids) > config.max_tokens for answer in used),
        dropped=dict(sorted(Counter(reason for kind, reason in fates if kind == "dropped").items())),
    )


def _fate(answer: Answer, max_tokens: int) -> tuple[Literal["used", "empty", "refused", "dropped"], str]:
    """What becomes of an answer, and the reason if it is dropped."""
    if answer.status == "dropped":
        return "dropped", answer.finish_reason
    if answer.status == "refused":
        return "refused", ""
    if answer.status == "empty" or not answer.answer_ids:
        return "empty", ""
    if len(answer.prompt_ids) >= max_tokens:
        return "dropped", "no room for the answer"
    return "used", ""


def _sample(row: int, answer: Answer, max_tokens: int, heldout: set[str]) -> Sample:
    mask = [0] * len(answer.prompt_ids) + [1] * len(answer.answer_ids)
    return Sample(
        row=row,
        sample_id=answer.sample_id,
        messages=answer.messages,
        input_ids=[*answer.prompt_ids, *answer.answer_ids][:max_tokens],
        loss_mask=mask[:max_tokens],
        split="heldout" if conversation(answer.sample_id) in heldout else "train",
        finish_reason=answer.finish_reason,
        engine=answer.engine,
        sampling=answer.sampling,
    )


def _heldout_count(conversations: int, share: float) -> int:
    if conversations == 1:
        raise GateError(
            "data",
            "one conversation is left after preparing",
            expected="at least two, one to train on and one to hold out",
            fix="raise prompts.count, or see which answers were left out",
        )
    return min(max(1, round(share * conversations)), conversations - 1) if conversations else 0


def _order(answer: Answer, seed: int, heldout: set[str]) -> tuple[bool, bytes, int, str]:
    name = conversation(answer.sample_id)
    return name in heldout, _rank(seed, name), answer.turn, answer.sample_id


def _rank(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{name}".encode()).digest()
