"""From answers to samples: what is left out, what is cut, which rows are held out."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from infra.config.round import PrepareConfig
from infra.data.history import OTHER_HISTORY, History
from infra.errors import GateError
from infra.store.answers import GIVEN, Answer
from infra.store.columns import Lazy
from infra.store.sample_ids import SampleId
from infra.store.samples import Sample

TOO_LONG = "prompt too long"
"""Reason of an answer that was not asked for, since its prompt is longer than the round takes."""
HELD_OUT_ONCE = "further answers to held-out prompts"
"""Reason of an answer that is not used: a held-out prompt is measured by its first answer."""
Fate = tuple[Literal["used", "empty", "refused", "dropped"], str]


@dataclass(frozen=True)
class BuildReport:
    """The samples of a round and what became of every answer.

    Attributes:
        samples: in row order, each made from its answer when it is asked for.
        answers: how many answers went in.
        truncated: answers cut at the longest answer (they are used all the same).
        empty: answers without a token, left out.
        refused: prompts that the engine refused, left out.
        cut: samples shortened to the longest sample, and kept.
        dropped: other answers left out, by the reason in their ``finish_reason``.
    """

    samples: Sequence[Sample]
    answers: int = 0
    truncated: int = 0
    empty: int = 0
    refused: int = 0
    cut: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


def with_right_histories(answers: Mapping[str, Answer], history: History) -> Sequence[Answer]:
    """The answers; a later turn whose prompt is not what the target's earlier answers make of it becomes ``dropped``.

    Whatever wrote the answers (an earlier version, say), each prompt is made again here, from the earlier answers'
    token ids, and compared with the one that the target answered.

    Args:
        answers: by sample id.
    """
    names = list(answers)
    later = [name for name in names if not name.endswith("#0")]  # a first turn has no history
    faults = {name: fault for name in later if (fault := _history_fault(answers[name], answers, history))}

    def judged(place: int) -> Answer:
        answer = answers[names[place]]
        fault = faults.get(names[place])
        return replace(answer, status="dropped", finish_reason=fault) if fault else answer

    return Lazy(len(names), judged)


def _history_fault(answer: Answer, answers: Mapping[str, Answer], history: History) -> str | None:
    if not answer.turn or answer.status != "ok" or answer.engine == GIVEN:
        return None
    name = SampleId.read(answer.sample_id)
    earlier = [found for turn in range(answer.turn) if (found := answers.get(name.at(turn)))]
    return history.fault(answer, earlier) if len(earlier) == answer.turn else OTHER_HISTORY


def wrong_histories(samples: Sequence[Sample], history: History) -> int:
    """How many stored samples have a prompt that is not what the earlier turns' samples make of it.

    Samples that cannot be compared are not counted: an earlier turn is not there, was cut, or cannot be shown again.
    """
    rows = {sample.sample_id: row for row, sample in enumerate(samples) if sample.engine != GIVEN}
    wrong = 0
    for sample_id, row in rows.items():
        name = SampleId.read(sample_id)
        earlier = [place for turn in range(name.turn) if (place := rows.get(name.at(turn))) is not None]
        if name.turn and len(earlier) == name.turn:
            answers = [_answer(samples[place]) for place in earlier]
            wrong += history.fault(_answer(samples[row]), answers) == OTHER_HISTORY
    return wrong


def _answer(sample: Sample) -> Answer:
    """The answer that a sample was made of (its end may be cut off)."""
    start = sample.loss_mask.index(1)
    prompt_ids, answer_ids = sample.input_ids[:start], sample.input_ids[start:]
    turn = SampleId.read(sample.sample_id).turn
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


class _Weighed(NamedTuple):
    """What is remembered of an answer, at its place among the others."""

    place: int
    name: SampleId
    tokens: int
    truncated: bool
    fate: Fate


def build_samples(answers: Sequence[Answer], config: PrepareConfig, seed: int = 0) -> BuildReport:
    """Samples in row order: training rows first, then held-out rows, each ordered by a hash of seed and prompt.

    All that answers a prompt is on one side. Of the prompts whose first answer is used ``round(heldout * prompts)`` are
    held out, at least one and not all; their further answers are dropped. Neither split nor order depends on the order
    of ``answers``.

    Raises:
        GateError: only one such prompt is left, so nothing can be held out.
    """
    weighed = [_weighed(place, answer, config.max_tokens) for place, answer in enumerate(answers)]
    first = {item.name.prompt for item in weighed if item.fate[0] == "used" and not item.name.answer}
    ranked = sorted(first, key=lambda prompt: _rank(seed, prompt))
    heldout = set(ranked[: _heldout_count(len(ranked), config.heldout)])
    weighed = [
        item._replace(fate=("dropped", HELD_OUT_ONCE))
        if item.fate[0] == "used" and item.name.answer and item.name.prompt in heldout
        else item
        for item in weighed
    ]
    counts = Counter(item.fate[0] for item in weighed)
    used = [item for item in weighed if item.fate[0] == "used"]
    used.sort(key=lambda item: _order(item.name, seed, heldout))
    return BuildReport(
        samples=Lazy(len(used), lambda row: _sample(row, answers[used[row].place], config.max_tokens, heldout)),
        answers=len(weighed),
        truncated=sum(item.truncated for item in weighed),
        empty=counts["empty"],
        refused=counts["refused"],
        cut=sum(item.tokens > config.max_tokens for item in used),
        dropped=dict(sorted(Counter(item.fate[1] for item in weighed if item.fate[0] == "dropped").items())),
    )


def _weighed(place: int, answer: Answer, max_tokens: int) -> _Weighed:
    return _Weighed(
        place=place,
        name=SampleId.read(answer.sample_id),
        tokens=len(answer.prompt_ids) + len(answer.answer_ids),
        truncated=answer.finish_reason == "length",
        fate=_fate(answer, max_tokens),
    )


def _fate(answer: Answer, max_tokens: int) -> Fate:
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
        split="heldout" if SampleId.read(answer.sample_id).prompt in heldout else "train",
        finish_reason=answer.finish_reason,
        engine=answer.engine,
        sampling=answer.sampling,
    )


def _heldout_count(prompts: int, share: float) -> int:
    if prompts == 1:
        raise GateError(
            "data",
            "one conversation is left after preparing",
            expected="at least two, one to train on and one to hold out",
            fix="raise prompts.count, or see which answers were left out",
        )
    return min(max(1, round(share * prompts)), prompts - 1) if prompts else 0


def _order(name: SampleId, seed: int, heldout: set[str]) -> tuple[bool, bytes, int, str]:
    return name.prompt in heldout, _rank(seed, name.prompt), name.turn, str(name)


def _rank(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{name}".encode()).digest()
