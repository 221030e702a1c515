"""Which hidden states may be deleted: only what can be made again, and only as far as the round's policy goes.

Hidden states are reproducible while their samples are kept, so those of a round may go once its draft is trained,
evaluated and published. Answers, samples, drafts, figures and reports always stay.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import ValidationError

from infra.config.round import RetentionConfig, RoundConfig
from infra.disk.item import Item
from infra.errors import StoreError
from infra.results import REPORT
from infra.store.objects import ObjectStore
from infra.store.rounds import Pointer, RoundStore
from infra.store.samples import samples_fault

RESULTS = {
    "answers": "what the target said is not said twice",
    "samples": "hidden states are extracted again from them",
    "draft": "a trained draft",
    "eval": "figures of a round",
    "report": "the report of a round",
}
"""Steps that are never offered, and why."""


@dataclass(frozen=True)
class Lets:
    """Which of a round's hidden states a policy lets go.

    Attributes:
        superseded: generations in whose place a newer, verified one is live.
        published: the live generation, once the draft that was trained on it is published.
    """

    superseded: bool
    published: bool


def by_itself(policy: RetentionConfig) -> Lets:
    """What a round's own policy lets go while nobody works on the round, or the round itself asks."""
    return Lets(policy.stale_generations, policy.states == "until_published")


def beside(rounds: RoundStore, policy: RetentionConfig) -> Lets:
    """What of another round the policy of a running round lets go; the other's last start is respected."""
    return Lets(last_policy(rounds, policy).stale_generations, policy.earlier_rounds)


def policies(store: ObjectStore, configs: Iterable[RoundConfig]) -> dict[str, RetentionConfig]:
    """Retention by round: what its file lets go, as far as its last start, which may have had overrides, did too."""
    return {config.name: last_policy(RoundStore(store, config.name), config.retention) for config in configs}


def last_policy(rounds: RoundStore, asked: RetentionConfig) -> RetentionConfig:
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


def states(rounds: RoundStore, lets: Lets | None, busy: bool = False) -> list[Item]:
    """The generations of a round's hidden states, superseded ones first, each with whether it may go and why.

    Args:
        lets: what the policy lets go; None when no policy of the round is known.
        busy: whether somebody works on the round: then nothing may go.
    """
    name, items = rounds.round_name, []
    for key in rounds.keys("hidden"):
        prefix = rounds.step_prefix("hidden", key)
        size = sum(item.size for item in rounds.store.list(prefix))
        may_go, why = _verdict(rounds, key, lets, busy)
        items.append(Item(prefix, size, f"{name}: {why}", may_go and size > 0, not busy, round=name))
    return sorted(items, key=lambda item: (not item.may_go, "superseded" not in item.why, item.path))


def results(store: ObjectStore, name: str) -> list[Item]:
    """What of a round always stays, and why."""
    sizes = {step: _size(store, f"rounds/{name}/{step}") for step in RESULTS}
    return [
        Item(f"rounds/{name}/{step}", size, f"{name}: {RESULTS[step]}", may_go=False, round=name)
        for step, size in sizes.items()
        if size
    ]


def published(store: ObjectStore) -> list[Item]:
    """What was published, which always stays."""
    size = _size(store, "published")
    return [Item("published", size, "published drafts", may_go=False)] if size else []


def is_published(rounds: RoundStore, key: str) -> bool:
    """Whether the draft that is published was trained on these states."""
    pointer = rounds.current("published")
    return pointer is not None and pointer.made.get("hidden") == key


def _size(store: ObjectStore, prefix: str) -> int:
    return sum(item.size for item in store.list(prefix))


def _verdict(rounds: RoundStore, key: str, lets: Lets | None, busy: bool) -> tuple[bool, str]:
    """Whether these states may go, and why or why not; those of a round whose records cannot be read stay."""
    if busy:
        return False, "the round is being worked on"
    if lets is None:
        return False, "no round file names this round, so its policy is not known"
    try:
        return _by_pointers(rounds, key, lets)
    except StoreError as error:
        return False, str(error)


def _by_pointers(rounds: RoundStore, key: str, lets: Lets) -> tuple[bool, str]:
    live = rounds.current("hidden")
    if key == _wanted(rounds):
        return False, (
            "the last start of the round is for them, and has not published yet; the next run goes on with them"
        )
    if live is not None and key != live.key and key in live.made.get("supersedes", []):
        if lets.superseded:
            return True, f"superseded by generation {live.key}"
        return False, "superseded, and retention.stale_generations is false"
    if live is None or key != live.key:
        return False, (
            "of other samples or not finished, and nothing was published of them; a run with their settings goes on"
        )
    if (reason := _unfinished(rounds, live)) is not None:
        return False, reason
    if lets.published:
        return True, "draft trained, evaluated and published; samples are kept"
    return False, "retention.states is keep"


def _wanted(rounds: RoundStore) -> str | None:
    """Key of the states that the round's last start was for, until what it was to publish is published.

    The pointers alone do not tell: of a round that was published and is run again with another training they name the
    old draft until the new one is there. In the store it is seen by every node, whatever locks this machine knows.
    """
    started, pointer = rounds.provenance(), rounds.current("published")
    if started is None:
        return None
    keys = started["keys"]
    if pointer is not None and pointer.key == keys.get("published"):
        return None
    if rounds.store.exists(f"{rounds.step_prefix('report', str(keys.get('report')))}/{REPORT}"):
        return None  # a round that was finished before another was published under its name
    return str(keys.get("hidden"))


def _unfinished(rounds: RoundStore, live: Pointer) -> str | None:
    """Why the live states are still needed or could not be made again; None when neither is so."""
    made = {step: rounds.current(step) for step in ("samples", "draft", "eval", "published")}
    samples, draft, evaluation, publication = made.values()
    if samples is None or live.made.get("samples") != samples.key:
        return "they are of other samples than the live ones"
    if draft is None or draft.made.get("hidden") != live.key:
        return "no draft is trained on them yet"
    if evaluation is None or evaluation.made.get("draft") != draft.key:
        return "their draft is not evaluated yet"
    if publication is None or publication.made.get("draft") != draft.key:
        return "their draft is not published yet"
    fault = samples_fault(rounds.store, rounds.step_prefix("samples", samples.key))
    return None if fault is None else f"they could not be made again: {fault}"
