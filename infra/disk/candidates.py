"""What of the store, of scratch and of shared memory could be deleted: for a running round, and for a clean-up."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from infra.config.round import RetentionConfig
from infra.config.settings import Settings
from infra.disk.item import Item, remove
from infra.disk.retention import beside, by_itself, published, results, states
from infra.disk.scratch import in_scratch
from infra.errors import ConfigError
from infra.machine.locks import is_busy, round_lock
from infra.machine.segments import forget_segments, leftover_segments
from infra.store.objects import ObjectStore
from infra.store.rounds import RoundStore

Policies = Mapping[str, RetentionConfig]
"""Retention by round, for the rounds whose policy is known."""


def candidates(store: ObjectStore, settings: Settings, name: str, policy: RetentionConfig, own: str) -> Iterator[Item]:
    """What the policy of the round ``name`` lets go while it runs, in order; each kind is looked for in its turn.

    Half-written objects of dead writers, shared memory of dead engines, leftovers in scratch (of its own only the
    checkpoints of finished drafts), superseded and then published hidden states, other rounds' first.

    Args:
        own: prefix of the states that the round works on, which are never offered.
    """
    yield from nobodys(store, settings)
    busy = {other for other in rounds_here(store, settings) if other != name and is_busy(settings.run_dir, other)}
    for other in _folders(settings.scratch_dir):
        for item in in_scratch(store, settings.scratch_dir / other, busy=other in busy):
            if item.may_go and (other != name or Path(item.path).name.startswith("train-")):
                yield item
    for item in _states(store, name, policy, busy):
        if item.path != own:
            yield item


def after_publishing(store: ObjectStore, settings: Settings, name: str, policy: RetentionConfig) -> list[Item]:
    """Hidden states that the policy lets go when the round has published, its own included."""
    busy = {other for other in rounds_here(store, settings) if other != name and is_busy(settings.run_dir, other)}
    return list(_states(store, name, policy, busy))


def survey(store: ObjectStore, settings: Settings, policies: Policies) -> list[Item]:
    """Everything of ours on this machine and in the store, with what may go, and why; changes nothing."""
    items = nobodys(store, settings)
    for name in rounds_here(store, settings):
        items += _of_round(store, settings, policies, name, is_busy(settings.run_dir, name))
    return [*items, *published(store)]


def clean(store: ObjectStore, settings: Settings, policies: Policies) -> list[Item]:
    """Delete what :func:`survey` finds, holding a round's lock no longer than what is its own is looked at and goes."""
    items = nobodys(store, settings)
    remove(store, items)
    for name in rounds_here(store, settings):
        try:
            with round_lock(settings.run_dir, name):
                of_round = _of_round(store, settings, policies, name, busy=False)
                remove(store, of_round)
        except ConfigError:  # somebody works on it
            of_round = _of_round(store, settings, policies, name, busy=True)
        items += of_round
    forget_segments(settings.run_dir)
    return [*items, *published(store)]


def free(store: ObjectStore, settings: Settings, name: str, item: Item) -> int | None:
    """Delete something for the running round ``name``; the bytes freed, or None: its own round was begun since."""
    if item.round in ("", name):
        return remove(store, [item])
    try:
        with round_lock(settings.run_dir, item.round):
            return remove(store, [item])
    except ConfigError:
        return None


def nobodys(store: ObjectStore, settings: Settings) -> list[Item]:
    """Half-written objects whose writers died, and segments in /dev/shm that dead engines of ours have left."""
    why = "half written, and its writer died"
    half = [Item(item.path, item.size, why, may_go=True, where="temporary") for item in store.temporaries()]
    return half + [
        Item(str(item.path), item.size, f"shared memory of a dead {item.purpose}", may_go=True, where="local")
        for item in leftover_segments(settings.run_dir)
    ]


def rounds_here(store: ObjectStore, settings: Settings) -> list[str]:
    """Names of the rounds that the store or this machine's scratch holds something of."""
    return sorted({*store.folders("rounds"), *_folders(settings.scratch_dir)})


def _states(store: ObjectStore, name: str, policy: RetentionConfig, busy: Iterable[str]) -> Iterator[Item]:
    """Hidden states of any round that the policy of the round ``name`` lets go, its own last."""
    for other in sorted(set(store.folders("rounds")) - set(busy), key=lambda one: (one == name, one)):
        rounds = RoundStore(store, other)
        lets = by_itself(policy) if other == name else beside(rounds, policy)
        yield from (item for item in states(rounds, lets) if item.may_go)


def _of_round(store: ObjectStore, settings: Settings, policies: Policies, name: str, busy: bool) -> list[Item]:
    """All that one round has in scratch and store."""
    lets = by_itself(policies[name]) if name in policies else None
    return [
        *in_scratch(store, settings.scratch_dir / name, busy),
        *states(RoundStore(store, name), lets, busy),
        *results(store, name),
    ]


def _folders(folder: Path) -> Iterable[str]:
    return sorted(item.name for item in folder.iterdir() if item.is_dir()) if folder.is_dir() else ()
