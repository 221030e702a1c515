"""A finished round's files in a store, made without running any step."""

from typing import Any, get_args

from infra.data.builtin import Split
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
