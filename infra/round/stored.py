"""What the steps of a round have stored, by the round's keys; a result that is not whole counts as none."""

from contextlib import suppress

from pydantic import TypeAdapter

from infra.config.keys import key12
from infra.errors import StoreError
from infra.results import REPORT, TRAINING, Convention, Evaluation, Parity, Report, Result, Training
from infra.round.context import RoundContext
from infra.store.objects import ObjectMissing
from infra.store.rounds import read_stored, whole
from infra.store.samples import samples_fault

CONVENTION, PARITY, EVALUATION = "convention.json", "parity.json", "evaluation.json"
COUNTS = "counts.json"
COUNTED = TypeAdapter(dict[str, int])
MADE_FROM = {"samples": ("answers",), "draft": ("hidden",), "eval": ("draft",), "published": ("draft", "hidden")}
"""Which earlier steps' keys a pointer names, so that retention can follow the chain."""

RESULTS = ("answers", "samples", "draft", "eval", "published", "report")
"""Steps whose results stay when a round is finished; its hidden states may go."""


def point(context: RoundContext, step: str) -> None:
    """Make this round's key the step's live one, unless it is; hidden states have :func:`make_live` instead."""
    key = getattr(context.keys, step)
    with suppress(StoreError):  # a damaged pointer is written anew
        live = context.rounds.current(step)
        if live is not None and live.key == key:
            return
    made: dict[str, object] = {"versions": context.versions}
    made |= {earlier: getattr(context.keys, earlier) for earlier in MADE_FROM.get(step, ())}
    context.rounds.point(step, key, made)


def all_live(context: RoundContext) -> bool:
    """Whether each of a finished round's results is the live one of its step."""
    pointers = {step: context.rounds.current(step) for step in RESULTS}
    return all(live is not None and live.key == getattr(context.keys, step) for step, live in pointers.items())


def write_result(context: RoundContext, step: str, name: str, result: Result) -> None:
    """Store a step's result; it is what makes the step done, so it goes last."""
    context.store.put(f"{context.prefix(step)}/{name}", result.model_dump_json(indent=1).encode())
    point(context, step)


def training(context: RoundContext) -> Training | None:
    """The training result of this key, if the draft's files are whole."""
    prefix = context.prefix("draft")
    result = read_stored(context.store, f"{prefix}/{TRAINING}", Training)
    if result is None:
        return None
    return result if whole(context.store, prefix, result.files, result.sizes) else None


def evaluation(context: RoundContext) -> Evaluation | None:
    """The evaluation of this key."""
    return read_stored(context.store, f"{context.prefix('eval')}/{EVALUATION}", Evaluation)


def report(context: RoundContext) -> Report | None:
    """The report of this key."""
    return read_stored(context.store, f"{context.prefix('report')}/{REPORT}", Report)


def convention(context: RoundContext) -> Convention | None:
    """The convention gate's measurement; it passed, since nothing else is stored."""
    return read_stored(context.store, convention_path(context), Convention)


def convention_path(context: RoundContext) -> str:
    """Where it lies: under the key of the hidden states, in a folder of its own, since it outlives them."""
    return f"{context.rounds.step_prefix('convention', context.keys.hidden)}/{CONVENTION}"


def parity(context: RoundContext) -> Parity | None:
    """The parity gate's comparison; it passed, since nothing else is stored."""
    return read_stored(context.store, parity_path(context), Parity)


def parity_path(context: RoundContext) -> str:
    """Where it lies: a folder of its own, since it outlives the states it speaks of."""
    engine = context.config.serve_with
    key = key12(
        hidden=context.keys.hidden,
        engine=engine,
        version=context.versions[engine],
        launch=context.config.engines[engine],
    )
    return f"{context.rounds.step_prefix('parity', key)}/{PARITY}"


def write_gate(context: RoundContext, path: str, measured: Convention | Parity) -> None:
    """Store what a gate measured and let pass."""
    context.store.put(path, measured.model_dump_json(indent=1).encode())


def samples_done(context: RoundContext) -> bool:
    """Whether the samples of this key are complete and verify, their counts too."""
    return samples_fault(context.store, context.prefix("samples")) is None and _counts(context) is not None


def sample_counts(context: RoundContext) -> dict[str, int]:
    """What was truncated, empty, refused, cut or left out on the way.

    Raises:
        StoreError: the samples are not prepared.
    """
    counts = _counts(context)
    if counts is None:
        raise StoreError(f"the samples of round {context.config.name} have no {COUNTS}", fix="start the round again")
    return counts


def _counts(context: RoundContext) -> dict[str, int] | None:
    """The counts, or None when they are not there or not whole."""
    try:
        return COUNTED.validate_json(context.store.get(f"{context.prefix('samples')}/{COUNTS}"))
    except (ObjectMissing, ValueError):
        return None
