"""How far the states of two engines for the same tokens are apart, by tap, by token and in what they lead to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from infra.engines.client.extraction import States
from infra.gates.capture import Head, near_ties
from infra.results import Parity, TapParity
from infra.targets.target import Target

ENGINE_SHARE = 0.2
"""Most that one engine's median error against the reference may be of the distance to the nearer neighbouring layer:
the convention gate's bound, too. (SmolLM2-135M, run: transformers in bfloat16 0.004 to 0.021, vLLM in bfloat16 up to
0.05, the nearer neighbouring layer 0.23 to 0.87.)"""
PAIR_SHARE = 2 * ENGINE_SHARE
"""The same between two engines: each within its share, they are at most two shares apart. An engine that is off by a
layer is a whole distance from the truth, so at least 1 - 0.2 from the other."""
PLAIN_BOUND = 0.1
"""Most that a median between two engines may be where the distance between layers is not known."""
STRETCHES = 24
POSITIONS = 512
"""Most positions whose logits are compared: a logit costs vocabulary times width."""
REACH = 2
"""How many layers to either side a state beyond its bound is looked for."""
Seen = tuple[Literal["offset", "order", "norm"], str]
"""What a state beyond its bound was recognised as, and in words."""


@dataclass(frozen=True)
class Side:
    """What one engine makes of the sequences and conversations.

    Args:
        name: engine and version.
        states: one entry a sequence.
        chats: token ids of each conversation under the engine's own tokenizer and chat template.
    """

    name: str
    states: Sequence[States]
    chats: Sequence[Sequence[int]] = field(default=())

    def slot(self, slot: int, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """float32 [tokens, hidden] of one slot, all sequences joined; ``lengths``: so much of the first ones only."""
        if lengths is None:
            lengths = [len(item.token_ids) for item in self.states]
        parts = zip(self.states, lengths, strict=False)
        return torch.cat([item.hidden_states[:length, slot] for item, length in parts]).float()


class Layers:
    """What the reference computes for (the beginnings of) the first sequences: every layer of the target.

    Args:
        hidden: float32 [tokens, L + 1, hidden] for each of them.
        head: the target's norm and head.
    """

    def __init__(self, hidden: Sequence[torch.Tensor], head: Head) -> None:
        self.lengths = [len(states) for states in hidden]
        self._all, self._head = torch.cat(list(hidden)), head
        self.last = self._all.shape[1] - 1

    def tap(self, tap: int) -> torch.Tensor:
        """float32 [tokens, hidden]; tap L post-norm."""
        return self._head.normed(self._all[:, tap]) if tap == self.last else self._all[:, tap]

    def neighbour(self, tap: int) -> float:
        """Median distance of a tap to the nearer of its neighbouring layers; of tap L, post-norm."""
        if tap == self.last:
            return median(self._head.normed(self._all[:, tap - 1]), self.tap(tap))
        around = [near for near in (tap - 1, tap + 1) if near >= 0]
        return min(median(self._all[:, near], self._all[:, tap]) for near in around)


def compare(target: Target, taps: Sequence[int], one: Side, other: Side, layers: Layers | None, head: Head) -> Parity:
    """Compare two sides that were given the same sequences; judges nothing.

    Args:
        taps: taps of the slots, ascending; the slot of tap L comes after them.
        one: the engine that extracts; errors are relative to its states.
        other: the engine that serves.
        layers: of the reference, for the first sequences; None when there is none.
    """
    if [item.token_ids.tolist() for item in one.states] != [item.token_ids.tolist() for item in other.states]:
        raise ValueError("two engines can be compared on the same sequences only")
    longest = max(len(item.token_ids) for item in one.states)
    stretch = max(8, -(-longest // STRETCHES))
    last = target.shape.layers
    rows = [_tap(slot, tap, one, other, layers, stretch, head if tap == last else None)
            for slot, tap in enumerate((*taps, last))]  # fmt: skip
    share, counted, ties = _argmax(one, other, head)
    return Parity(
        extracting=one.name,
        serving=other.name,
        layers=last,
        sequences=len(one.states),
        tokens=sum(len(item.token_ids) for item in one.states),
        stretch=stretch,
        reference=layers is not None,
        taps=tuple(_recognised(rows, taps, one, other, layers, head)),
        argmax=share,
        argmax_counted=counted,
        near_ties=ties,
        conversations=len(one.chats),
    )


def errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative error of each token, float32 [tokens]."""
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-12)


def median(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Median over the tokens of the relative error: a few tokens with huge states do not decide it."""
    return float(errors(found, expected).median())


def _tap(
    slot: int, tap: int, one: Side, other: Side, layers: Layers | None, stretch: int, norm: Head | None
) -> TapParity:
    expected, found = one.slot(slot), other.slot(slot)
    if norm is not None:
        expected, found = norm.normed(expected), norm.normed(found)
    off = errors(found, expected)
    neighbour = layers.neighbour(tap) if layers is not None else None
    return TapParity(
        tap=tap,
        median=float(off.median()),
        p99=float(off.quantile(0.99)),
        worst=float(off.max()),
        worst_at=_place(one.states, int(off.argmax())),
        bound=PLAIN_BOUND if neighbour is None else PAIR_SHARE * neighbour,
        neighbour=neighbour,
        by_position=tuple(_by_position(off, one.states, stretch)),
    )


def _place(states: Sequence[States], row: int) -> str:
    for number, item in enumerate(states):
        if row < len(item.token_ids):
            return f"sequence {number}, position {row}, token {int(item.token_ids[row])}"
        row -= len(item.token_ids)
    raise IndexError(row)


def _by_position(off: torch.Tensor, states: Sequence[States], stretch: int) -> Iterable[float]:
    places = torch.cat([torch.arange(len(item.token_ids)) for item in states]) // stretch
    return (float(off[places == number].median()) for number in range(int(places.max()) + 1))


def _argmax(one: Side, other: Side, head: Head) -> tuple[float, int, int]:
    """(share that agrees, positions counted, near-ties) over evenly spaced positions."""
    first, second = one.slot(-1), other.slot(-1)
    chosen = torch.linspace(0, len(first) - 1, min(POSITIONS, len(first))).round().long()
    agree = counted = 0
    for part in chosen.split(64):
        mine, theirs = head.logits(head.normed(first[part])), head.logits(head.normed(second[part]))
        clear = ~(near_ties(mine) | near_ties(theirs))
        agree += int((mine.argmax(-1) == theirs.argmax(-1))[clear].sum())
        counted += int(clear.sum())
    return agree / counted if counted else 1.0, counted, len(chosen) - counted


def _recognised(
    rows: Sequence[TapParity], taps: Sequence[int], one: Side, other: Side, layers: Layers | None, head: Head
) -> Iterable[TapParity]:
    """The rows, those beyond their bound with what was recognised in them."""
    for slot, row in enumerate(rows):
        if row.median <= row.bound:
            yield row
            continue
        if slot == len(taps):
            seen = _final_seen(one, other, layers, head)
        elif layers is None:
            seen = _slot_seen(one, other, slot, taps)
        else:
            seen = _layer_seen(one, slot, taps, layers) or _layer_seen(other, slot, taps, layers)
            seen = seen or _slot_seen(one, other, slot, taps)
        yield row if seen is None else row.model_copy(update={"cause": seen[0], "seen": seen[1]})


def _layer_seen(side: Side, slot: int, taps: Sequence[int], layers: Layers) -> Seen | None:
    """Which layer's states a side gave instead; None when it gave the right ones or none is like them."""
    tap, found = taps[slot], side.slot(slot, layers.lengths)
    near = {number for number in range(tap - REACH, tap + REACH + 1) if 0 <= number < layers.last} | set(taps)
    distances = {number: median(found, layers.tap(number)) for number in near}
    best = min(distances, key=distances.__getitem__)
    if best == tap or distances[best] > ENGINE_SHARE * layers.neighbour(best):
        return None
    text = f"{side.name} gives tap {best} where {tap} was asked"
    if abs(best - tap) <= REACH:
        return "offset", f"{text}: off by {best - tap:+d}"
    return "order", f"{text}: its slots are in another order"


def _slot_seen(one: Side, other: Side, slot: int, taps: Sequence[int]) -> Seen | None:
    found = other.slot(slot)
    for number, tap in enumerate(taps):
        if number != slot and median(found, one.slot(number)) <= PLAIN_BOUND:
            return "order", f"{other.name} gives at tap {taps[slot]} what {one.name} gives at tap {tap}"
    return None


def _final_seen(one: Side, other: Side, layers: Layers | None, head: Head) -> Seen | None:
    """Whether a side gave the final state after the norm with the norm's weight still in it."""
    for side, witness in ((one, other), (other, one)):
        lengths = layers.lengths if layers is not None else None
        normed = layers.tap(layers.last) if layers is not None else head.normed(witness.slot(-1))
        if median(_unit(side.slot(-1, lengths)), _unit(normed)) <= PLAIN_BOUND:
            return "norm", f"{side.name} gives the state after the final norm, with the norm's weight in it"
    return None


def _unit(states: torch.Tensor) -> torch.Tensor:
    return states / states.norm(dim=-1, keepdim=True).clamp_min(1e-12)
