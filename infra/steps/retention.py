"""What may be deleted: only what can be made again, in the policy's order, and why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from infra.config.round import RetentionConfig
from infra.store.objects import ObjectStore
from infra.store.rounds import RoundStore
from infra.store.samples import samples_fault


@dataclass(frozen=True)
class Removal:
    """Something that may go.

    Attributes:
        path: prefix in the store.
        size: bytes that it frees.
        why: why it may go, for people.
    """

    path: str
    size: int
    why: str


def removable(store: ObjectStore, current: str, policy: RetentionConfig) -> list[Removal]:
    """Hidden states that the policy lets go, earlier rounds first.

    Hidden states are reproducible while their samples are kept, so those of a round may go once its draft is trained,
    evaluated and published. Samples, drafts, reports and published drafts are never offered.

    Args:
        current: name of the round that asks; its own live states go only by ``policy.states``.
    """
    found: list[Removal] = []
    for name in sorted(store.folders("rounds"), key=lambda item: (item == current, item)):
        rounds = RoundStore(store, name)
        if policy.stale_generations:
            found += _stale(rounds)
        own = name == current
        if (own and policy.states == "until_published") or (not own and policy.earlier_rounds):
            found += _finished(rounds)
    return found


def removable_everywhere(store: ObjectStore, policies: Mapping[str, RetentionConfig]) -> list[Removal]:
    """What each round's own policy lets go; rounds without a known policy are left alone."""
    found: dict[str, Removal] = {}
    for name, policy in policies.items():
        own_only = policy.model_copy(update={"earlier_rounds": False})
        for item in removable(store, name, own_only):
            found[item.path] = item
    return list(found.values())


def remove(store: ObjectStore, removals: list[Removal]) -> int:
    """Delete what was found; returns bytes freed."""
    return sum(store.delete_tree(item.path) for item in removals)


def _size(store: ObjectStore, prefix: str) -> int:
    return sum(item.size for item in store.list(prefix))


def _stale(rounds: RoundStore) -> Iterator[Removal]:
    """Generations that the live one superseded: its pointer, written when it was verified, names them.

    A generation that is being made is in nobody's list.
    """
    live = rounds.current("hidden")
    if live is None:
        return
    for key in sorted(set(live.made.get("supersedes", [])) & set(rounds.keys("hidden")) - {live.key}):
        prefix = rounds.step_prefix("hidden", key)
        why = f"{rounds.round_name}: superseded by generation {live.key}"
        yield Removal(prefix, _size(rounds.store, prefix), why)


def _finished(rounds: RoundStore) -> Iterator[Removal]:
    """The live states, if a draft was trained on them, evaluated and published, and their samples are whole."""
    made = {step: rounds.current(step) for step in ("samples", "hidden", "draft", "eval", "published")}
    samples, hidden, draft = made["samples"], made["hidden"], made["draft"]
    evaluation, published = made["eval"], made["published"]
    if samples is None or hidden is None or draft is None or evaluation is None or published is None:
        return
    chain = (
        hidden.made.get("samples") == samples.key,
        draft.made.get("hidden") == hidden.key,
        evaluation.made.get("draft") == draft.key,
        published.made.get("draft") == draft.key,
    )
    if not all(chain) or samples_fault(rounds.store, rounds.step_prefix("samples", samples.key)) is not None:
        return
    prefix = rounds.step_prefix("hidden", hidden.key)
    size = _size(rounds.store, prefix)
    if size:
        why = f"{rounds.round_name}: draft trained, evaluated and published; samples are kept"
        yield Removal(prefix, size, why)
