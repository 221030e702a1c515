"""What may be deleted: only what can be made again, in the policy's order, and why; and why the rest stays."""

import shutil
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from infra.config.round import RetentionConfig, RoundConfig
from infra.errors import StoreError
from infra.results import REPORT
from infra.store.objects import ObjectStore
from infra.store.rounds import RoundStore
from infra.store.samples import samples_fault

RESULTS = {
    "answers": "what the target said is not said twice",
    "samples": "hidden states are extracted again from them",
    "draft": "a trained draft",
    "eval": "figures of a round",
    "report": "the report of a round",
}
"""Steps that are never offered, and why."""


Where = Literal["store", "temporary", "local"]


@dataclass(frozen=True)
class Removal:
    """Something that may go.

    Attributes:
        path: what goes.
        size: bytes that it frees.
        why: why it may go, for people.
        where: ``store``: all below the prefix ``path``; ``temporary``: the half-written object there; ``local``: a
            file or folder of this machine.
        round: the round it belongs to; empty when it is nobody's.
    """

    path: str
    size: int
    why: str
    where: Where = "store"
    round: str = ""

    def place(self, store: ObjectStore) -> Path | None:
        """Where it lies on this machine; None in a bucket."""
        return Path(self.path) if self.where == "local" else store.local_path(self.path.rsplit("/", 1)[0])


@dataclass(frozen=True)
class Kept:
    """Something that stays.

    Attributes:
        path: as in :class:`Removal`.
        size: bytes that it holds.
        why: why it stays, for people.
        by_hand: a person may decide to delete it: it can be made again.
        where: as in :class:`Removal`.
    """

    path: str
    size: int
    why: str
    by_hand: bool = False
    where: Where = "store"


def temporaries(store: ObjectStore) -> list[Removal]:
    """What writers left in the store that died while writing."""
    why = "half written, and its writer died"
    return [Removal(item.path, item.size, why, where="temporary") for item in store.temporaries()]


def removable(store: ObjectStore, current: str, policy: RetentionConfig, busy: Container[str] = ()) -> list[Removal]:
    """Hidden states that the policy lets go, earlier rounds first.

    Hidden states are reproducible while their samples are kept, so those of a round may go once its draft is trained,
    evaluated and published. Samples, drafts, reports and published drafts are never offered.

    Args:
        current: name of the round that asks; its own live states go only by ``policy.states``.
        busy: rounds that other processes work on: nothing of theirs is offered.
    """
    found: list[Removal] = []
    for name in sorted(store.folders("rounds"), key=lambda item: (item == current, item)):
        own = name == current
        if name in busy and not own:
            continue
        rounds = RoundStore(store, name)
        stale = (policy if own else _policy(rounds, policy)).stale_generations
        finished = policy.states == "until_published" if own else policy.earlier_rounds
        found += _of_round(rounds, stale, finished)
    return found


def policies(store: ObjectStore, configs: Iterable[RoundConfig]) -> dict[str, RetentionConfig]:
    """Retention by round: what its file lets go, as far as its last start, which may have had overrides, did too."""
    return {config.name: _policy(RoundStore(store, config.name), config.retention) for config in configs}


def _policy(rounds: RoundStore, asked: RetentionConfig) -> RetentionConfig:
    """What ``asked`` and the round's last start both let go; nothing where the latter cannot be read."""
    try:
        started = rounds.provenance()
        had = asked if started is None else RetentionConfig.model_validate(started["round"].get("retention", {}))
    except (StoreError, ValidationError):
        had = RetentionConfig(states="keep", stale_generations=False)
    return RetentionConfig(
        states="keep" if "keep" in (asked.states, had.states) else "until_published",
        earlier_rounds=asked.earlier_rounds,
        stale_generations=asked.stale_generations and had.stale_generations,
    )


def removable_by_itself(store: ObjectStore, name: str, policy: RetentionConfig) -> list[Removal]:
    """Hidden states of a round that nobody works on and that its own policy lets go."""
    return _of_round(RoundStore(store, name), policy.stale_generations, policy.states == "until_published")


def _of_round(rounds: RoundStore, stale: bool, finished: bool) -> list[Removal]:
    """A round's superseded and finished states, as asked for; nothing of one whose records cannot be read."""
    try:
        wanted = rounds.step_prefix("hidden", _wanted(rounds) or "")
        found = [*(_stale(rounds) if stale else ()), *(_finished(rounds) if finished else ())]
        return [item for item in found if item.path != wanted]
    except StoreError:
        return []


def _wanted(rounds: RoundStore) -> str | None:
    """Key of the states that the round's last start was for, until what it was to publish is published.

    The pointers alone do not tell: of a round that was published and is run again with another training they name the
    old draft until the new one is there. In the store it is seen by every node, whatever locks this machine knows.
    """
    started, published = rounds.provenance(), rounds.current("published")
    if started is None:
        return None
    keys = started["keys"]
    if published is not None and published.key == keys.get("published"):
        return None
    if rounds.store.exists(f"{rounds.step_prefix('report', str(keys.get('report')))}/{REPORT}"):
        return None  # a round that was finished before another was published under its name
    return str(keys.get("hidden"))


def remove(store: ObjectStore, removals: Iterable[Removal]) -> int:
    """Delete what was found; returns the bytes freed."""
    freed = 0
    for item in removals:
        if item.where == "store":
            freed += store.delete_tree(item.path)
            continue
        if item.where == "temporary":
            store.sweep_temporaries()  # all that are left: whoever lives is not among them
        elif Path(item.path).is_dir():
            shutil.rmtree(item.path)
        else:
            Path(item.path).unlink(missing_ok=True)
        freed += item.size
    return freed


def kept(
    store: ObjectStore, name: str, policy: RetentionConfig | None, gone: Collection[str], busy: bool
) -> list[Kept]:
    """What of a round in the store stays, each with its reason.

    Args:
        policy: the round's own; None when it is not known.
        gone: paths of the removals.
        busy: whether somebody works on the round.
    """
    found, rounds = [], RoundStore(store, name)
    for key in rounds.keys("hidden"):
        prefix = rounds.step_prefix("hidden", key)
        if prefix not in gone:
            why = _why_states_stay(rounds, key, policy, busy)
            found.append(Kept(prefix, _size(store, prefix), f"{name}: {why}", by_hand=not busy))
    for step, why in RESULTS.items():
        if size := _size(store, f"rounds/{name}/{step}"):
            found.append(Kept(f"rounds/{name}/{step}", size, f"{name}: {why}"))
    return found


def published(store: ObjectStore) -> list[Kept]:
    """What was published, which always stays."""
    size = _size(store, "published")
    return [Kept("published", size, "published drafts")] if size else []


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
        yield Removal(prefix, _size(rounds.store, prefix), why, round=rounds.round_name)


def _finished(rounds: RoundStore) -> Iterator[Removal]:
    """The live states, if a draft was trained on them, evaluated and published, and their samples are whole."""
    hidden = rounds.current("hidden")
    if hidden is None or _unfinished(rounds) is not None:
        return
    prefix = rounds.step_prefix("hidden", hidden.key)
    size = _size(rounds.store, prefix)
    if size:
        why = f"{rounds.round_name}: draft trained, evaluated and published; samples are kept"
        yield Removal(prefix, size, why, round=rounds.round_name)


def is_published(rounds: RoundStore, key: str) -> bool:
    """Whether the draft that is published was trained on these states."""
    published = rounds.current("published")
    return published is not None and published.made.get("hidden") == key


def _unfinished(rounds: RoundStore) -> str | None:
    """Why the live states are still needed or could not be made again; None when neither is so."""
    made = {step: rounds.current(step) for step in ("samples", "hidden", "draft", "eval", "published")}
    samples, hidden, draft = made["samples"], made["hidden"], made["draft"]
    evaluation, published = made["eval"], made["published"]
    if samples is None or hidden is None or hidden.made.get("samples") != samples.key:
        return "they are of other samples than the live ones"
    if draft is None or draft.made.get("hidden") != hidden.key:
        return "no draft is trained on them yet"
    if evaluation is None or evaluation.made.get("draft") != draft.key:
        return "their draft is not evaluated yet"
    if published is None or published.made.get("draft") != draft.key:
        return "their draft is not published yet"
    fault = samples_fault(rounds.store, rounds.step_prefix("samples", samples.key))
    return None if fault is None else f"they could not be made again: {fault}"


def _why_states_stay(rounds: RoundStore, key: str, policy: RetentionConfig | None, busy: bool) -> str:
    if busy:
        return "the round is being worked on"
    if policy is None:
        return "no round file names this round, so its policy is not known"
    try:
        return _why_by_pointers(rounds, key)
    except StoreError as error:
        return str(error)


def _why_by_pointers(rounds: RoundStore, key: str) -> str:
    live = rounds.current("hidden")
    if key == _wanted(rounds):
        return "the last start of the round is for them, and has not published yet; the next run goes on with them"
    if live is None or (key != live.key and key not in live.made.get("supersedes", [])):
        return "of other samples or not finished, and nothing was published of them; a run with their settings goes on"
    if key != live.key:
        return "superseded, and retention.stale_generations is false"
    if (reason := _unfinished(rounds)) is not None:
        return reason
    return "retention.states is keep"
