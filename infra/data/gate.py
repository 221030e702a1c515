"""The data gate: what must be true of the samples before hidden states are made of them."""

import unicodedata
from collections.abc import Callable, Sequence

from infra.config.round import GenerateConfig
from infra.data.build import HELD_OUT_ONCE, TOO_LONG, BuildReport
from infra.data.history import ENDINGS
from infra.data.prompt import Prompt
from infra.errors import GateError
from infra.store.samples import Sample

CONTEXT_TOKENS = 8


def data_gate(
    samples: Sequence[Sample],
    report: BuildReport,
    generate: GenerateConfig,
    *,
    vocab_size: int,
    training: Sequence[Prompt],
    evaluation: Sequence[Prompt],
) -> None:
    """Stops a round whose samples cannot be trained on.

    Args:
        samples: the samples as they will be extracted, in row order.
        report: what became of the answers.
        generate: the bounds for truncated, empty and refused answers.
        vocab_size: number of token ids of the target.
        training: the prompts the samples come from.
        evaluation: the prompts the draft is measured on.

    Raises:
        GateError: with what was measured, what was expected and the likely cause.
    """
    shares_gate(report, generate)
    if not samples:
        raise _stop(
            f"there are no samples, out of {report.answers} answers",
            expected="at least two",
            fix="see why the generate step answered nothing",
        )
    _samples(samples, vocab_size)
    leakage_gate(training, evaluation)


def leakage_gate(training: Sequence[Prompt], evaluation: Sequence[Prompt]) -> None:
    """Stops a round that would be measured on what it trains on.

    The opening user turn of each evaluation prompt is looked for among all user turns of the training prompts; later
    turns ("Make it shorter.") are too general to compare. Case, width and white space are ignored.

    Raises:
        GateError: an evaluation prompt is among the training prompts.
    """
    trained = {_normal(text): prompt.id for prompt in training for text in _user_turns(prompt)}
    openings = [(prompt.id, _normal(_user_turns(prompt)[0])) for prompt in evaluation]
    shared = [(name, trained[text]) for name, text in openings if text in trained]
    if shared:
        examples = ", ".join(f"{one} (trained on as {other})" for one, other in shared[:3])
        raise _stop(
            f"{len(shared)} of {len(evaluation)} evaluation prompts are training prompts too: {examples}",
            expected="no user text in both",
            fix="give prompts.source and evaluate.prompts.source different data",
        )


def template_gate(ours: Sequence[int], engines: Sequence[int], decode: Callable[[list[int]], str]) -> None:
    """Stops a round whose engine turns a conversation into other token ids than the target's template here.

    Args:
        ours: token ids rendered here.
        engines: token ids that the engine made of the same messages.
        decode: text of token ids.

    Raises:
        GateError: naming the first token that differs, with its surroundings as text.
    """
    ours, engines = list(ours), list(engines)
    if ours == engines:
        return
    shorter = min(len(ours), len(engines))
    place = next((n for n in range(shorter) if ours[n] != engines[n]), shorter)
    start, end = max(0, place - CONTEXT_TOKENS), place + CONTEXT_TOKENS
    raise _stop(
        f"template and engine differ from token {place} on ({len(ours)} tokens here, {len(engines)} there): "
        f"after {decode(ours[start:place])!r} comes {decode(ours[place:end])!r} here "
        f"and {decode(engines[place:end])!r} in the engine",
        expected="the same token ids",
        fix="give both the same chat template and template_args; let the engine add no BOS of its own",
    )


def shares_gate(report: BuildReport, generate: GenerateConfig) -> None:
    """Stops a round too many of whose answers are cut, empty or unusable.

    Raises:
        GateError: a share is above its bound.
    """
    _share(
        report,
        report.truncated,
        generate.max_truncated,
        "answers are cut at generate.max_tokens",
        "generate.max_tokens is too small, or the target loops",
        "generate.max_truncated",
    )
    _share(
        report,
        report.empty,
        generate.max_empty,
        "answers are empty",
        "the template leads straight to the end token: look at prompts.template_args",
        "generate.max_empty",
    )
    # Prompts beyond prompts.max_prompt_tokens and further answers to held-out prompts are left out because the round
    # says so; turns behind an answer that was cut (bounded above) or cannot be shown again were never asked.
    meant = (TOO_LONG, HELD_OUT_ONCE, *ENDINGS)
    dropped = {reason: count for reason, count in report.dropped.items() if reason not in meant}
    reasons = "".join(f", {count} {reason}" for reason, count in dropped.items())
    _share(
        report,
        report.refused + sum(dropped.values()),
        generate.max_refused,
        f"answers cannot be used ({report.refused} refused by the engine{reasons})",
        "prompts too long for the engine or for prepare.max_tokens, a template that changes given answers, or answers "
        "of an earlier version with a wrong history",
        "generate.max_refused",
    )


def history_gate(wrong: int, samples: int, generate: GenerateConfig) -> None:
    """Stops a round too many of whose stored samples show earlier answers otherwise than the target wrote them.

    Raises:
        GateError: their share is above ``generate.max_refused``.
    """
    if wrong > generate.max_refused * samples:
        raise _stop(
            f"{wrong} of {samples} samples show earlier answers otherwise than the target wrote them: "
            f"{wrong / samples:.1%}. Likely cause: an earlier version made them, which left marks of thinking out",
            expected=f"at most {generate.max_refused:.1%}",
            fix="generate anew: delete this round's folders `answers` and `samples`, or give the round another name",
        )


def _share(report: BuildReport, count: int, bound: float, what: str, cause: str, field: str) -> None:
    if count > bound * report.answers:
        raise _stop(
            f"{count} of {report.answers} {what}: {count / report.answers:.1%}. Likely cause: {cause}",
            expected=f"at most {bound:.1%}",
            fix=f"mend the cause, or raise {field} if this is meant",
        )


def _samples(samples: Sequence[Sample], vocab_size: int) -> None:
    """Look at each sample once: they may be made as they are asked for."""
    seen: set[str] = set()
    splits: list[str] = []
    tokens = supervised = 0
    bare = ""
    for place, sample in enumerate(samples):
        if sample.row != place:
            raise _stop(f"sample {sample.sample_id} at place {place} has row {sample.row}", expected="rows 0, 1, 2 ...")
        if sample.sample_id in seen:
            raise _stop(
                f"sample id {sample.sample_id} comes twice",
                expected="one sample for each answered turn",
                fix="look for prompts or answers with the same id",
            )
        if sample.split == "train" and splits[-1:] == ["heldout"]:
            raise _stop(
                f"training row {sample.row} comes after held-out row {place - 1}",
                expected="all training rows first (the trainer splits by position)",
            )
        _tokens(sample, vocab_size)
        seen.add(sample.sample_id)
        if sample.split not in splits:
            splits.append(sample.split)
        written = sum(sample.loss_mask)
        tokens, supervised = tokens + len(sample.input_ids), supervised + written
        bare = bare or ("" if written else sample.sample_id)
    _splits(splits)
    _supervised(tokens, supervised, bare)


def _splits(found: Sequence[str]) -> None:
    missing = {"train", "heldout"} - set(found)
    if missing:
        raise _stop(
            f"there are no samples for {sorted(missing)}",
            expected="samples to train on and samples held out",
            fix="raise prompts.count or change prepare.heldout",
        )


def _tokens(sample: Sample, vocab_size: int) -> None:
    ids, mask = sample.input_ids, sample.loss_mask
    if not ids or len(ids) != len(mask) or not set(mask) <= {0, 1}:
        raise _stop(
            f"sample {sample.sample_id} has {len(ids)} tokens, and {len(mask)} mask values of {sorted(set(mask))[:4]}",
            expected="one 0 or 1 for each token",
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise _stop(
            f"sample {sample.sample_id} has ids {min(ids)} to {max(ids)}. Likely cause: another target's answers",
            expected=f"ids from 0 to {vocab_size - 1}, the target's vocabulary",
            fix="generate the answers again with this round's target",
        )


def _supervised(tokens: int, supervised: int, bare: str) -> None:
    """``bare``: the first sample without a supervised token."""
    if supervised in (0, tokens):
        raise _stop(
            f"{supervised // tokens:.0%} of {tokens} tokens are supervised. Likely cause: loss masks that do not tell "
            "prompt from answer",
            expected="the answers' tokens, and those only",
        )
    if bare:
        raise _stop(f"sample {bare} has no supervised token", expected="an answer in every sample")


def _stop(
    what: str, *, expected: str, fix: str = "run prepare again; if it stops here again, its code is at fault"
) -> GateError:
    return GateError("data", what, expected=expected, fix=fix)


def _user_turns(prompt: Prompt) -> list[str]:
    return [message["content"] for message in prompt.messages if message["role"] == "user"] + list(prompt.turns)


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
