"""The round's samples as they lie in the store, and what became of every answer."""

from pydantic import TypeAdapter

from infra.errors import StoreError
from infra.round.context import Round
from infra.store.objects import ObjectMissing
from infra.store.samples import samples_fault

COUNTS = "counts.json"
COUNTED = TypeAdapter(dict[str, int])


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
