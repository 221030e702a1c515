"""The parity gate: the engine that extracts and the engine that serves must compute the same states.

A draft is trained on the states of one engine and fed with those of another. Where the two differ by a layer, a norm
or a template, training looks fine and acceptance in serving is near nothing. The gate gives both engines the same
tokens, one engine after the other, and stops the round unless they agree.
"""

import logging
from collections.abc import Callable, Sequence

from infra.config.load import build_round
from infra.config.round import EngineName, RoundConfig
from infra.data.prompt import Message
from infra.engines.client.pool import run_ordered
from infra.engines.reference.process import Reference, ReferenceUnavailable
from infra.errors import GateError
from infra.gates.agreement import Layers, Side, compare
from infra.gates.capture import Head
from infra.results import Parity, TapParity
from infra.round.context import RoundContext
from infra.round.serving import Serving

log = logging.getLogger(__name__)

PARITY = "parity.json"
ARGMAX_AGREEMENT = 0.95
"""Least share of positions, near-ties apart, at which both final states lead to the same token."""
ARGMAX_MINIMUM = 20
STRETCH_FACTOR = 2.0
"""How far the median of one stretch of positions may lie above the bound: it has fewer tokens."""
REFERENCE_TOKENS = 1024
"""Most tokens that the reference computes; it gives every layer of the target, so it needs memory."""


def alone(config: RoundConfig, engine: EngineName, samples: int) -> RoundConfig:
    """The round as one engine alone would do it, under a name of its own, so that it meets no real round's files.

    Raises:
        ConfigError: the round does not describe the engine.
    """
    changes = {
        "name": f"parity-{config.name}"[:63],
        "extract.engine": engine,
        "serve_with": engine,
        "gates.parity.samples": samples,
        "train.devices": 1,  # nothing is trained, so the engine alone decides how many GPUs are wanted
    }
    return build_round(config.model_dump(mode="json"), changes, origin=f"round {config.name}")


def environment_of(context: RoundContext) -> str:
    """Name of the extracting engine's environment."""
    return f"{context.config.extract.engine}-{context.extracting.device}"


def sequences(context: RoundContext) -> list[list[int]]:
    """A handful of the round's samples as token ids, from the longest to the shortest in even steps.

    The longest is where chunked prefill has something to cut.
    """
    return _spread(context, context.samples.token_counts.tolist(), context.samples.token_ids)


def prompt_sequences(context: RoundContext) -> list[list[int]]:
    """As :func:`sequences`, from the round's prompts under the target's template: no samples are needed."""
    arguments = context.config.prompts.template_args
    rendered = [context.chat.render(prompt.messages, arguments) for prompt in context.prompts]
    return _spread(context, [len(ids) for ids in rendered], rendered.__getitem__)


def _spread(context: RoundContext, lengths: list[int], ids: Callable[[int], list[int]]) -> list[list[int]]:
    bounds = context.config.gates.parity
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    count = min(bounds.samples, len(order))
    places = {round(number * (len(order) - 1) / max(1, count - 1)) for number in range(count)}
    longest = min(bounds.tokens, context.extracting.max_model_len - 1)
    return [ids(order[place])[:longest] for place in sorted(places)]


def conversations(context: RoundContext) -> list[list[Message]]:
    """Conversations whose tokens both engines are asked for."""
    return [list(prompt.messages) for prompt in context.prompts[: context.config.gates.parity.samples]]


def take(serving: Serving, tokens: Sequence[Sequence[int]]) -> Side:
    """What a server of profile ``extract`` makes of the sequences, several in flight, and of the conversations.

    Raises:
        ExtractionFault: the engine gave something else than the states of these tokens.
        EngineError: it cannot be reached, fails, or does not tell its tokens.
    """
    context, config = serving.context, serving.context.config
    client = serving.ready(config.extract.timeout_seconds)
    extractor = serving.extractor(config.extract.timeout_seconds)
    flight = min(config.extract.concurrency, len(tokens))
    send = serving.flights.around(extractor.extract)
    states = [captured for _, captured in run_ordered(tokens, send, flight, len(tokens))]
    arguments = config.prompts.template_args
    chats = [client.tokenize_chat(messages, arguments) for messages in conversations(context)]
    return Side(f"{serving.engine} {context.versions[serving.engine]}", states, chats)


def judge(context: RoundContext, extracting: Side, serving: Side) -> Parity:
    """Compare two sides, with the distances between the target's layers where a reference can give them.

    Args:
        extracting: of the engine that extracts.
        serving: of the engine that serves.
    """
    head = Head(context.target)
    result = compare(
        context.target, context.config.extract.taps, extracting, serving, _layers(context, extracting, head), head
    )
    return result.model_copy(update={"tokeniser_fault": _tokeniser_fault(context, extracting, serving)})


def parity_gate(result: Parity) -> None:
    """Stop when two engines do not compute the same.

    Raises:
        GateError: they part in tokens, in states at a tap, or in the tokens that the final states lead to.
    """
    if result.tokeniser_fault:
        raise GateError(
            "parity",
            result.tokeniser_fault,
            expected="the same token ids from both engines and the target's own template",
            fix="give both engines the tokenizer and chat template in the target's folder, and the same template_args",
        )
    faults = [text for tap in result.taps if (text := tap_fault(result, tap))]
    if faults:
        raise GateError(
            "parity",
            f"{result.serving} does not compute what {result.extracting} computes for the same "
            f"{result.tokens:,} tokens: " + "; ".join(faults),
            expected="medians within their bounds at every tap",
            fix=_remedy(result),
        )
    if result.argmax_counted >= ARGMAX_MINIMUM and result.argmax < ARGMAX_AGREEMENT:
        raise GateError(
            "parity",
            f"the final states of {result.extracting} and {result.serving} lead to the same token at "
            f"{result.argmax:.1%} of {result.argmax_counted} positions ({result.near_ties} near-ties apart)",
            expected=f"at least {ARGMAX_AGREEMENT:.0%}",
            fix="look for differences in weights, dtype or quantisation between the two engines",
        )


def tap_fault(result: Parity, tap: TapParity) -> str:
    """What is wrong at a tap, in words; empty when nothing is."""
    name = "the final state" if tap.tap == result.layers else f"tap {tap.tap}"
    if tap.median > tap.bound:
        why = f", {tap.seen}" if tap.seen else ""
        return f"{name} differs by {tap.median:.3g} in the median, bound {tap.bound:.2g}{why}"
    bad = [number for number, value in enumerate(tap.by_position) if value > STRETCH_FACTOR * tap.bound]
    if bad:
        start = bad[0] * result.stretch
        return (
            f"{name} differs by {tap.by_position[bad[0]]:.3g} from position {start} on and agrees before it"
            if bad[-1] == len(tap.by_position) - 1
            else f"{name} differs by {tap.by_position[bad[0]]:.3g} around position {start}"
        )
    return ""


REMEDIES = {
    "offset": "correct the row of this family and version in that engine's layer_ids.py (infra/engines)",
    "order": "that engine gives its taps in another order: correct how its states are joined",
    "norm": "that engine's final state must be stored before the norm, or divided by the norm's weight",
}


def _remedy(result: Parity) -> str:
    beyond = [tap for tap in result.taps if tap.median > tap.bound]
    for cause, remedy in REMEDIES.items():
        if any(tap.cause == cause for tap in beyond):
            return remedy
    if not beyond:
        return "most states are right: look at chunked prefill, prefix caching and attention windows"
    if len(beyond) == len(result.taps):
        return "every tap differs: compare weights, dtype, quantisation, rotary settings and attention backends"
    return "no layer near by explains it: compare dtype, quantisation and attention backends of the two engines"


def _layers(context: RoundContext, side: Side, head: Head) -> Layers | None:
    mode = context.config.gates.convention.reference
    if mode == "none":
        return None
    chosen: list[list[int]] = []
    room = REFERENCE_TOKENS
    for states in side.states:
        chosen.append(states.token_ids[:room].tolist())
        room -= len(chosen[-1])
        if not room:
            break
    try:
        device, devices = context.extracting.device, context.devices
        with Reference(context.target, context.settings, mode, device, devices, context.scratch) as reference:
            return Layers([states.hidden for states in reference.states(chosen)], head)
    except ReferenceUnavailable as error:
        log.info(f"parity is judged without the distances between layers: {error}")
        return None


def _tokeniser_fault(context: RoundContext, extracting: Side, serving: Side) -> str:
    arguments = context.config.prompts.template_args
    for number, messages in enumerate(conversations(context)):
        ours = context.chat.render(messages, arguments)
        for side in (extracting, serving):
            theirs = list(side.chats[number])
            if theirs != ours:
                shorter = min(len(ours), len(theirs))
                place = next((n for n in range(shorter) if ours[n] != theirs[n]), shorter)
                return (
                    f"{side.name} turns conversation {number} into {len(theirs)} tokens, the target's template into "
                    f"{len(ours)}; from token {place} on it has {context.chat.decode(theirs[place : place + 8])!r} "
                    f"where the template has {context.chat.decode(ours[place : place + 8])!r}"
                )
    return ""
