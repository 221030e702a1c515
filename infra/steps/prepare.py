"""The prepare step: answers become samples, the data gate judges them."""

import json

from pydantic import TypeAdapter

from infra.data.build import BuildReport, build_samples, with_right_histories, wrong_histories
from infra.data.gate import data_gate, history_gate, shares_gate
from infra.errors import StoreError
from infra.round.context import Round
from infra.store.answers import read_answers
from infra.store.objects import ObjectMissing
from infra.store.samples import samples_fault, write_samples

COUNTS = "counts.json"
HISTORIES = "histories.json"
"""How many samples have a wrong history; looked for once, also in samples of earlier versions."""
COUNTED = TypeAdapter(dict[str, int])


def samples_done(round_: Round) -> bool:
    """Whether the samples of this key are complete and verify, their counts too."""
    return samples_fault(round_.store, round_.prefix("samples")) is None and _counts(round_) is not None


def prepare(round_: Round) -> bool:
    """Build, judge and write the samples of this round's key; returns whether they were there already.

    Those that were there are judged again by the bounds of ``generate``, which do not enter the key, and their
    histories are compared if that was never done.

    Raises:
        GateError: the data gate stops.
    """
    if samples_done(round_):
        shares_gate(_counted(sample_counts(round_)), round_.config.generate)
        history_gate(_wrong_histories(round_), len(round_.samples), round_.config.generate)
        return True
    prefix = round_.prefix("samples")
    answers = with_right_histories(read_answers(round_.store, round_.prefix("answers")), round_.history)
    built = build_samples(answers, round_.config.prepare, seed=round_.config.prompts.seed)
    data_gate(
        built.samples,
        built,
        round_.config.generate,
        vocab_size=round_.target.shape.vocab_size,
        training=round_.prompts,
        evaluation=round_.evaluation_prompts,
    )
    counts = {
        "answers": built.answers,
        "truncated": built.truncated,
        "empty": built.empty,
        "refused": built.refused,
        "cut": built.cut,
        **built.dropped,
    }
    round_.store.put(f"{prefix}/{COUNTS}", json.dumps(counts, indent=1).encode())
    round_.store.put(f"{prefix}/{HISTORIES}", b"0")  # the wrong ones are among the dropped
    write_samples(round_.store, prefix, built.samples)
    return False


def sample_counts(round_: Round) -> dict[str, int]:
    """What was truncated, empty, refused, cut or left out on the way.

    Raises:
        StoreError: the samples are not prepared.
    """
    counts = _counts(round_)
    if counts is None:
        raise StoreError(f"the samples of round {round_.config.name} have no {COUNTS}", fix="start the round again")
    return counts


def _wrong_histories(round_: Round) -> int:
    path = f"{round_.prefix('samples')}/{HISTORIES}"
    try:
        return int(round_.store.get(path))
    except (ObjectMissing, ValueError):
        wrong = wrong_histories(round_.samples, round_.history)
        round_.store.put(path, str(wrong).encode())
        return wrong


def _counted(counts: dict[str, int]) -> BuildReport:
    """What became of the answers, as it was stored."""
    named = {name: counts.get(name, 0) for name in ("answers", "truncated", "empty", "refused", "cut")}
    dropped = {name: count for name, count in counts.items() if name not in named}
    return BuildReport([], **named, dropped=dropped)


def _counts(round_: Round) -> dict[str, int] | None:
    """The counts, or None when they are not there or not whole."""
    try:
        return COUNTED.validate_json(round_.store.get(f"{round_.prefix('samples')}/{COUNTS}"))
    except (ObjectMissing, ValueError):
        return None
