"""The convention gate: before every extraction, the captured layers are measured against the target itself.

An engine's layer ids mean what its version, the model's family and the list of ids make of them. The gate does not
trust the table: it takes a handful of the round's samples, with the round's exact taps, and compares what the engine
captured with every layer of a reference that shares no code with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from infra.engines.client.extraction import States
from infra.engines.client.pool import run_ordered
from infra.engines.reference.process import Reference, ReferenceStates, ReferenceUnavailable
from infra.errors import GateError
from infra.gates.agreement import median
from infra.gates.capture import AGREEMENT, Head, near_ties
from infra.gates.layer_errors import error_row, explain, ratio
from infra.results import Convention
from infra.round.context import RoundContext
from infra.round.serving import Serving
from infra.round.states import states_meta

NONE_ASKED = "gates.convention.reference is `none`"
NORM_ERROR = 0.02
"""Most that our norm of the reference's tap L may differ from the target's own (bfloat16: 0.004)."""

REMEDIES = {
    "ids": "correct the row of this version and family in infra/engines/<engine>/layer_ids.py, and see that no rung of "
    "the ladder sets ids of its own",
    "order": "the engine joins its layers in another order than it was given: see how its plugin or connector does it",
    "norm": "store the last layer's output before the norm, or what the norm gave divided by its weight",
    "unknown": "compare the target's files, dtype and quantisation with what the engine loaded; look at prefix "
    "caching, chunked prefill, rotary settings and the attention backend",
}


@dataclass(frozen=True)
class Truth:
    """What the reference makes of the prompts, or why there is none.

    Attributes:
        how: how it computed.
        why: why there is none; empty when there is.
    """

    states: Sequence[ReferenceStates] = field(default=())
    how: str = ""
    why: str = ""


def sequences(context: RoundContext) -> list[list[int]]:
    """The beginnings of a handful of the round's samples, evenly spread over its rows."""
    bounds, samples = context.config.gates.convention, context.samples
    count = min(bounds.samples, len(samples))
    rows = sorted({round(number * (len(samples) - 1) / max(1, count - 1)) for number in range(count)})
    return [list(samples[row].input_ids[: bounds.tokens]) for row in rows]


def compute_truth(context: RoundContext, tokens: Sequence[Sequence[int]]) -> Truth:
    """The reference's states of the sequences; without any when there can be none here, and why."""
    mode = context.config.gates.convention.reference
    if mode == "none":
        return Truth(why=NONE_ASKED)
    try:
        with Reference(
            context.target, context.settings, mode, context.extracting.device, context.devices, context.scratch
        ) as reference:
            return Truth(reference.states(tokens), reference.how)
    except ReferenceUnavailable as error:
        return Truth(why=error.what)


def capture(serving: Serving, tokens: Sequence[Sequence[int]]) -> list[States]:
    """What a server of profile ``extract`` makes of the sequences, several in flight.

    Raises:
        ExtractionFault: the engine gave something else than the states of these tokens.
        EngineError: it cannot be reached or fails.
    """
    config = serving.context.config.extract
    extractor = serving.extractor(config.timeout_seconds)
    send = serving.flights.around(extractor.extract)
    return [states for _, states in run_ordered(tokens, send, min(config.concurrency, len(tokens)), len(tokens))]


def measure(context: RoundContext, captured: Sequence[States], truth: Truth) -> Convention:
    """Errors of every slot against every layer, and what the final states lead to; judges, but stops nothing.

    Raises:
        GateError: the target's final norm is not what this project takes it for.
    """
    head, meta = Head(context.target), states_meta(context)
    taps = (*meta.taps, context.target.shape.layers)
    tokens = _Tokens(head)
    for number, states in enumerate(captured):
        tokens.add(states, truth.states[number].next_tokens if truth.states else None)
    changes: dict[str, object] = {
        "prompts": len(captured),
        "tokens": sum(len(states.token_ids) for states in captured),
        **tokens.counts,
    }
    causes: list[tuple[str, str]] = []
    if truth.states:
        rows, post_norm = _rows(captured, truth.states, head)
        changes |= {"medians": tuple(rows), "ratios": tuple(map(ratio, rows, taps))}
        engine = f"{meta.engine} version {meta.engine_version}"
        causes += explain(taps, rows, post_norm, engine, meta.final)
    found = _unmeasured(context, truth).model_copy(update=changes)
    causes = causes or _token_faults(found)
    return found.model_copy(
        update={
            "fault": "; ".join(sentence for _, sentence in causes),
            "remedy": "; ".join(dict.fromkeys(REMEDIES[cause] for cause, _ in causes)),
        }
    )


def unchecked(context: RoundContext) -> Convention:
    """The result of a round that asks for no reference: nothing is measured, and the report says so."""
    return _unmeasured(context, Truth(why=NONE_ASKED))


def convention_gate(found: Convention) -> None:
    """Stop when the engine does not capture what it was asked for.

    Raises:
        GateError: it does not; the sentence names the offset, the swap or the norm.
    """
    if found.fault:
        raise GateError(
            "convention",
            found.fault,
            expected=f"taps {', '.join(map(str, found.taps))}, each nearer to its own layer than to any other",
            fix=found.remedy,
        )


def _unmeasured(context: RoundContext, truth: Truth) -> Convention:
    meta = states_meta(context)
    return Convention(
        engine=f"{meta.engine} {meta.engine_version}",
        taps=(*meta.taps, context.target.shape.layers),
        reference=truth.how,
        why=truth.why,
    )


class _Tokens:
    """Counts where final states lead to the reference's token and to the engine's own."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.counts = dict.fromkeys(("argmax_agreed", "argmax_counted", "own_agreed", "own_counted", "near_ties"), 0)

    def add(self, states: States, expected: torch.Tensor | None) -> None:
        """One sequence; ``expected``: the reference's next tokens, int64 [tokens]."""
        logits = self._head.logits(self._head.normed(states.hidden_states[:, -1]))
        clear, best = ~near_ties(logits), logits.argmax(dim=-1)
        if bool(clear[-1]):
            self.counts["own_counted"] += 1
            self.counts["own_agreed"] += int(best[-1]) == states.next_token
        if expected is not None:
            self.counts["argmax_counted"] += int(clear.sum())
            self.counts["argmax_agreed"] += int((best == expected)[clear].sum())
            self.counts["near_ties"] += int((~clear).sum())


def _rows(
    captured: Sequence[States], truth: Sequence[ReferenceStates], head: Head
) -> tuple[list[tuple[float, ...]], float]:
    """(a row a slot, error of the last slot as it is against the state after the norm)."""
    states = torch.cat([item.hidden_states for item in captured]).float()
    layers, normed = torch.cat([item.hidden for item in truth]), torch.cat([item.normed for item in truth])
    ours = median(head.normed(layers[:, -1]), normed)
    if ours > NORM_ERROR:
        raise GateError(
            "convention",
            f"the target's final norm differs by {ours:.2g} from a plain RMSNorm with its weight",
            expected="x / sqrt(mean(x^2)) * weight, by which the final state is judged",
            fix="add the family's rule to the norm in infra/targets/final_norm.py",
        )
    rows = [error_row(states[:, slot], layers) for slot in range(states.shape[1] - 1)]
    rows.append(error_row(head.normed(states[:, -1]), head.normed(layers)))
    return rows, median(states[:, -1], normed)


def _token_faults(found: Convention) -> list[tuple[str, str]]:
    """The engine's own tokens judge.

    Agreement with the reference's tokens is shown, not judged: it falls with the rounding of an engine's dtype while
    the layers are right (bfloat16 on a GPU: 98 % for SmolLM2 on random tokens, 84 % for random weights).
    """
    if not _too_few(found.own_agreed, found.own_counted):
        return []
    return [
        (
            "unknown",
            f"the final states lead to the engine's own next token in {found.own_agreed} of {found.own_counted} "
            "prompts (near-ties apart)",
        )
    ]


def _too_few(agreed: int, counted: int) -> bool:
    """One disagreement proves nothing among a handful."""
    return counted - agreed > max(1.0, (1 - AGREEMENT) * counted)
