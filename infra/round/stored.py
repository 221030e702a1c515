"""What the steps of a round have stored, by the round's keys; a result that is not whole counts as none."""

from contextlib import suppress

from pydantic import TypeAdapter

from infra.config.keys import key12
from infra.errors import StoreError
from infra.results import REPORT, TRAINING, Convention, Evaluation, Parity, Report, Result, Training
from infra.round.context import Round
from infra.store.objects import ObjectMissing
from infra.store.rounds import read_stored, whole
from infra.store.samples import samples_fault

CONVENTION, PARITY, EVALUATION = "convention.json", "parity.json", "evaluation.json"
COUNTS = "counts.json"
COUNTED = TypeAdapter(dict[str, int])
MADE_FROM = {"samples": ("answers",), "draft": ("hidden",), "eval": ("draft",), "published": ("draft", "hidden")}
"""Which earlier steps' keys a pointer names, so that retention can follow the chain."""


def point(round_: Round, step: str) -> None:
    """Make this round's key the step's live one, unless it is; hidden states have :func:`make_live` instead."""
    key = getattr(round_.keys, step)
    with suppress(StoreError):  # a damaged pointer is written anew
        live = round_.rounds.current(step)
        if live is not None and live.key == key:
            return
    made: dict[str, object] = {"versions": round_.versions}
    made |= {earlier: getattr(round_.keys, earlier) for earlier in MADE_FROM.get(step, ())}
    round_.rounds.point(step, key, made)


def write_result(round_: Round, step: str, name: str, result: Result) -> None:
    """Store a step's result; it is what makes the step done, so it goes last."""
    round_.store.put(f"{round_.prefix(step)}/{name}", result.model_dump_json(indent=1).encode())
    point(round_, step)


def training(round_: Round) -> Training | None:
    """The training result of this key, if the draft's files are whole."""
    prefix = round_.prefix("draft")
    result = read_stored(round_.store, f"{prefix}/{TRAINING}", Training)
    if result is None:
        return None
    return result if whole(round_.store, prefix, result.files, result.sizes) else None


def evaluation(round_: Round) -> Evaluation | None:
    """The evaluation of this key."""
    return read_stored(round_.store, f"{round_.prefix('eval')}/{EVALUATION}", Evaluation)


def report(round_: Round) -> Report | None:
    """The report of this key."""
    return read_stored(round_.store, f"{round_.prefix('report')}/{REPORT}", Report)


def convention(round_: Round) -> Convention | None:
    """The convention gate's measurement; it passed, since nothing else is stored."""
    return read_stored(round_.store, convention_path(round_), Convention)


def convention_path(round_: Round) -> str:
    """Where it lies: under the key of the hidden states, in a folder of its own, since it outlives them."""
    return f"{round_.rounds.step_prefix('convention', round_.keys.hidden)}/{CONVENTION}"


def parity(round_: Round) -> Parity | None:
    """The parity gate's comparison; it passed, since nothing else is stored."""
    return read_stored(round_.store, parity_path(round_), Parity)


def parity_path(round_: Round) -> str:
    """Where it lies: a folder of its own, since it outlives the states it speaks of."""
    engine = round_.config.serve_with
    key = key12(
        hidden=round_.keys.hidden, engine=engine, version=round_.versions[engine], launch=round_.config.engines[engine]
    )
    return f"{round_.rounds.step_prefix('parity', key)}/{PARITY}"


def write_gate(round_: Round, path: str, measured: Convention | Parity) -> None:
    """Store what a gate measured and let pass."""
    round_.store.put(path, measured.model_dump_json(indent=1).encode())


def samples_done(round_: Round) -> bool:
    """Whether the samples of this key are complete and verify, their counts too."""
    return samples_fault(round_.store, round_.prefix("samples")) is None and _counts(round_) is not None


def sample_counts(round_: Round) -> dict[str, int]:
    """What was truncated, empty, refused, cut or left out on the way.

    Raises:
        StoreError: the samples are not prepared.
    """
    counts = _counts(round_)
    if counts is None:
        raise StoreError(f"the samples of round {round_.config.name} have no {COUNTS}", fix="start the round again")
    return counts


def _counts(round_: Round) -> dict[str, int] | None:
    """The counts, or None when they are not there or not whole."""
    try:
        return COUNTED.validate_json(round_.store.get(f"{round_.prefix('samples')}/{COUNTS}"))
    except (ObjectMissing, ValueError):
        return None
