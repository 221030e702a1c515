"""The round's hidden states in the store: which shards there are, which verify, which generation is live."""

import os
from collections.abc import Sequence
from contextlib import suppress

from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.disk.retention import is_published
from infra.engines.client.pool import run_ordered
from infra.engines.registry import find_engine
from infra.errors import StoreError
from infra.round.context import RoundContext
from infra.store.columns import Lazy
from infra.store.hidden import ShardFault, ShardPlan, plan_shards, state_bytes_per_token, verify_shard
from infra.store.hidden import discard_shard as discard
from infra.store.manifest import StatesMeta
from infra.store.reader import quarantined_rows
from infra.store.samples import Sample, TokenIds

AT_ONCE = 8
"""Most shards that are verified at once."""


def states_meta(context: RoundContext) -> StatesMeta:
    """What every manifest of this round's states must say."""
    engine = context.config.extract.engine
    return StatesMeta(
        taps=context.config.extract.taps,
        final=find_engine(engine).final_slot,
        dtype="bf16",
        hidden_size=context.target.shape.hidden_size,
        engine=engine,
        engine_version=context.versions[engine],
        target_revision=context.target.revision,
    )


def shards_of(context: RoundContext) -> list[ShardPlan]:
    """The shards that hold the round's samples."""
    config = context.config.extract
    size = state_bytes_per_token(config.taps, context.target.shape.hidden_size)
    return plan_shards(context.samples.token_counts.tolist(), size, config.shard_bytes)


def faulty_shards(context: RoundContext, deep: bool) -> dict[ShardPlan, str]:
    """The shards that are not there or do not verify, ascending, each with its fault; changes nothing.

    Args:
        deep: read every object and compare its checksum, too.
    """
    tokens = TokenIds(context.samples)
    store, prefix, meta, plans = context.store, context.prefix("hidden"), states_meta(context), shards_of(context)

    def fault(plan: ShardPlan) -> ShardFault | None:
        return verify_shard(store, prefix, plan, meta, tokens, deep=deep)

    at_once = min(AT_ONCE, os.cpu_count() or 1)
    # Files are read and hashed with other threads running.
    found = run_ordered(plans, fault, at_once, 2 * at_once)
    return {plan: str(fault) for plan, fault in found if fault is not None}


def quarantined_samples(context: RoundContext) -> list[Sample]:
    """Samples that have no states because the engine dies on them, as the committed shards say; by row."""
    return [context.samples[row] for row in quarantined_rows(context.store, context.prefix("hidden"))]


def extracted_samples(context: RoundContext) -> Sequence[Sample]:
    """The samples whose states are there to be trained on, by row: all but the quarantined ones."""
    samples, left_out = context.samples, set(quarantined_rows(context.store, context.prefix("hidden")))
    rows = [row for row in range(len(samples)) if row not in left_out]
    return Lazy(len(rows), lambda place: samples[rows[place]])


def generation(context: RoundContext) -> dict[str, object]:
    """What the pointer to a verified generation of hidden states says of it."""
    engine = context.config.extract.engine
    return {
        "samples": context.keys.samples,
        "target_revision": context.target.revision,
        "engine": f"{engine} {context.versions[engine]}",
        "taps": list(context.config.extract.taps),
    }


def make_live(context: RoundContext) -> None:
    """Point to this generation, which was verified, and name those that it supersedes.

    That is the one that was live, if it is of the same samples or its draft is published, and what it had superseded.
    One of other samples that no draft came of yet is a run's that was interrupted: nobody's to delete.
    """
    key = context.keys.hidden
    superseded: set[str] = set()
    with suppress(StoreError):  # a damaged pointer is written anew
        live = context.rounds.current("hidden")
        if live is not None:
            superseded.update(live.made.get("supersedes", []))
            if live.made.get("samples") == context.keys.samples or is_published(context.rounds, live.key):
                superseded.add(live.key)
    others = sorted(superseded & set(context.rounds.keys("hidden")) - {key})
    context.rounds.point("hidden", key, {**generation(context), "supersedes": others})


def discard_shard(context: RoundContext, plan: ShardPlan) -> int:
    """Delete what is left of a shard that does not verify, so that it can be done again; returns bytes freed."""
    return discard(context.store, context.prefix("hidden"), plan)


def stale(config: RoundConfig, settings: Settings) -> tuple[RoundContext | None, str]:
    """The round with the samples it has, and what changed, if its states are stale; else None, and why not.

    Raises:
        Eagle3Error: it cannot be looked at on this machine (no target, no engine, a damaged pointer).
    """
    rounds = RoundContext(config, settings).rounds
    live, samples = rounds.current("hidden"), rounds.current("samples")
    if live is None or samples is None:
        return None, "no hidden states yet"
    if live.key not in rounds.keys("hidden"):
        return None, "its hidden states were deleted; a round that needs them extracts them again"
    pinned = RoundContext(config, settings, samples_key=samples.key)
    key, now = pinned.keys.hidden, generation(pinned)
    if key == live.key:
        return None, f"generation {key} is current"
    changed = [
        f"{name} {live.made.get(name)} -> {value}" for name, value in now.items() if live.made.get(name) != value
    ]
    return pinned, "; ".join(changed) or "another shard layout"
