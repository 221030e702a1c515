"""The prepare step: answers become samples, the data gate judges them."""

import json

from infra.data.build import BuildReport, build_samples, with_right_histories, wrong_histories
from infra.data.gate import data_gate, history_gate, shares_gate
from infra.round.context import RoundContext
from infra.round.stored import COUNTS, sample_counts, samples_done
from infra.store.answers import read_answers
from infra.store.objects import ObjectMissing
from infra.store.samples import write_samples

HISTORIES = "histories.json"
"""How many samples have a wrong history; looked for once, also in samples of earlier versions."""


def prepare(context: RoundContext) -> bool:
    """Build, judge and write the samples of this round's key; returns whether they were there already.

    Those that were there are judged again by the bounds of ``generate``, which do not enter the key, and their
    histories are compared if that was never done.

    Raises:
        GateError: the data gate stops.
    """
    if samples_done(context):
        shares_gate(_counted(sample_counts(context)), context.config.generate)
        history_gate(_wrong_histories(context), len(context.samples), context.config.generate)
        return True
    prefix = context.prefix("samples")
    answers = with_right_histories(read_answers(context.store, context.prefix("answers")), context.history)
    built = build_samples(answers, context.config.prepare, seed=context.config.prompts.seed)
    data_gate(
        built.samples,
        built,
        context.config.generate,
        vocab_size=context.target.shape.vocab_size,
        training=context.prompts,
        evaluation=context.evaluation_prompts,
    )
    counts = {
        "answers": built.answers,
        "truncated": built.truncated,
        "empty": built.empty,
        "refused": built.refused,
        "cut": built.cut,
        **built.dropped,
    }
    context.store.put(f"{prefix}/{COUNTS}", json.dumps(counts, indent=1).encode())
    context.store.put(f"{prefix}/{HISTORIES}", b"0")  # the wrong ones are among the dropped
    write_samples(context.store, prefix, built.samples)
    return False


def _wrong_histories(context: RoundContext) -> int:
    path = f"{context.prefix('samples')}/{HISTORIES}"
    try:
        return int(context.store.get(path))
    except (ObjectMissing, ValueError):
        wrong = wrong_histories(context.samples, context.history)
        context.store.put(path, str(wrong).encode())
        return wrong


def _counted(counts: dict[str, int]) -> BuildReport:
    """What became of the answers, as it was stored."""
    named = {name: counts.get(name, 0) for name in ("answers", "truncated", "empty", "refused", "cut")}
    dropped = {name: count for name, count in counts.items() if name not in named}
    return BuildReport([], **named, dropped=dropped)
