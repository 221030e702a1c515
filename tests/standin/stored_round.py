"""A finished round's files in a store, made without running any step."""

from typing import Any, get_args

from infra.config.round import RetentionConfig
from infra.config.settings import Settings
from infra.data.builtin import Split
from infra.disk.candidates import after_publishing
from infra.disk.item import Item
from infra.disk.retention import by_itself, states
from infra.store.objects import ObjectStore
from infra.store.rounds import RoundStore
from infra.store.samples import Sample, write_samples


def finish(store: ObjectStore, name: str, **changes: dict[str, Any]) -> RoundStore:
    """A round whose draft is trained, evaluated and published, with hidden states of 1000 bytes.

    ``changes`` replace what a step's pointer says.
    """
    rounds = RoundStore(store, name)
    samples = [
        Sample(row, f"s{row}#0", [], [1, 2], [0, 1], split, "stop", "e", {})
        for row, split in enumerate(get_args(Split))
    ]
    write_samples(store, rounds.step_prefix("samples", "s1"), samples)
    store.put(f"{rounds.step_prefix('hidden', 'h1')}/00000/states", b"x" * 1000)
    made = {
        "samples": ("s1", {}),
        "hidden": ("h1", {"samples": "s1"}),
        "draft": ("d1", {"hidden": "h1"}),
        "eval": ("e1", {"draft": "d1"}),
        "published": ("p1", {"draft": "d1", "hidden": "h1"}),
    }
    for step, (key, says) in made.items():
        rounds.point(step, key, changes.get(step, says))
    return rounds


def offered(store: ObjectStore, name: str, policy: RetentionConfig) -> list[Item]:
    """Hidden states that a round's own policy lets go while nobody works on it."""
    return [item for item in states(RoundStore(store, name), by_itself(policy)) if item.may_go]


def staying(store: ObjectStore, name: str, policy: RetentionConfig) -> list[Item]:
    """Hidden states of the round that stay."""
    return [item for item in states(RoundStore(store, name), by_itself(policy)) if not item.may_go]


def offered_beside(store: ObjectStore, current: str, policy: RetentionConfig) -> list[Item]:
    """Hidden states of any round that the policy of the round ``current`` lets go."""
    return after_publishing(store, Settings(), current, policy)
