"""What captured states are, judged by their errors against every layer of a reference: tensors and numbers only.

A slot's row holds, for each tap j of the reference, the median over tokens of ||captured - reference_j|| /
||reference_j||. The slot *is* tap j when its smallest error is at j and is at most :data:`SHARE` of the error at the
nearer neighbour; the slot of tap L is compared after the final norm.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from infra.gates.agreement import ENGINE_SHARE, median

SHARE = ENGINE_SHARE
FINALS = {"pre_norm": "pre-norm", "unit_rms": "the norm's output divided by its weight"}
Row = Sequence[float]
Cause = Literal["ids", "order", "norm", "unknown"]


def error_row(captured: torch.Tensor, layers: torch.Tensor) -> tuple[float, ...]:
    """One slot's errors against each tap.

    Args:
        captured: float32 [tokens, hidden].
        layers: float32 [tokens, L + 1, hidden].
    """
    return tuple(median(captured, layers[:, tap]) for tap in range(layers.shape[1]))


def ratio(row: Row, tap: int) -> float:
    """Error at a tap over that at its nearer neighbour; 0 when both are 0."""
    nearest = min(row[near] for near in (tap - 1, tap + 1) if 0 <= near < len(row))
    return row[tap] / nearest if nearest else (0.0 if row[tap] == 0 else float("inf"))


def tap_seen(row: Row) -> int | None:
    """The tap that a row says the slot is; None when it is none of them."""
    best = min(range(len(row)), key=row.__getitem__)
    return best if ratio(row, best) <= SHARE else None


def explain(
    asked: Sequence[int], rows: Sequence[Row], post_norm: float, engine: str, final: str
) -> list[tuple[Cause, str]]:
    """What is wrong with the captured states, causes and sentences; empty when each slot is the tap asked for.

    Args:
        asked: taps of the slots, ascending, tap L last.
        rows: a row a slot.
        post_norm: median error of the last slot, as it is, against the reference's state after the final norm.
        engine: name and version.
        final: what the last slot should hold: ``pre_norm`` or ``unit_rms``.
    """
    last = asked[-1]
    by_tap = dict(zip(asked, rows, strict=True))
    seen = {tap: tap_seen(row) for tap, row in by_tap.items()}
    found: list[tuple[Cause, str]] = []
    if seen[last] != last and post_norm <= SHARE * by_tap[last][last]:
        seen[last] = last
        found.append(("norm", f"the final state is post-norm where {FINALS[final]} was expected"))
    misplaced = {tap: other for tap, other in seen.items() if other is not None and other != tap}
    if misplaced:
        found.append(_misplaced(misplaced, engine))
    found += [_unknown(tap, by_tap[tap], last) for tap, other in seen.items() if other is None]
    return found


def _misplaced(found: dict[int, int], engine: str) -> tuple[Cause, str]:
    """Slots that are other taps: swapped, in another order, or off by so many layers."""
    if sorted(found) == sorted(found.values()):
        if len(found) == 2:
            return "order", f"taps {' and '.join(map(str, found))} are swapped"
        return "order", f"taps {_list(found)} came in the order {_list(found.values())}"
    offsets = sorted({other - tap for tap, other in found.items()})
    one = len(found) == 1
    return "ids", (
        f"captured {'tap' if one else 'taps'} {_list(found.values())} where {_list(found)} {'was' if one else 'were'} "
        f"asked: ids are off by {' and '.join(f'{offset:+d}' for offset in offsets)} for engine {engine}"
    )


def _unknown(tap: int, row: Row, last: int) -> tuple[Cause, str]:
    best = min(range(len(row)), key=row.__getitem__)
    name = "the final state" if tap == last else f"what came as tap {tap}"
    return "unknown", (
        f"{name} is no layer of the reference: the nearest is tap {best}, with a median error of {row[best]:.2g}"
    )


def _list(taps: Iterable[int]) -> str:
    return ", ".join(map(str, taps))
