"""The draft in the layouts of the engines that can serve it, and why it is not in one of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.config.round import ENGINES, EngineName, TargetShape
from infra.engines.draft import read_config
from infra.engines.limits import wrapper_fault
from infra.engines.registry import find_engine
from infra.errors import EngineError
from infra.results import Layout
from infra.round.context import RoundContext
from infra.store.rounds import local_copy
from infra.targets.target import Target


def draft_folder(context: RoundContext) -> Path:
    """A local folder with this round's draft in speculators' format; fetched into scratch from a remote store."""
    return local_copy(context.store, context.prefix("draft"), context.scratch / f"draft-{context.keys.draft}")


def served_draft(context: RoundContext, draft: Path) -> Path:
    """The draft as the serving engine loads it; raises as :func:`draft_for`."""
    return draft_for(context, context.config.serve_with, draft)


def draft_for(context: RoundContext, name: str, draft: Path) -> Path:
    """The draft as an engine loads it; where that needs a layout of its own, a folder in scratch.

    Args:
        name: the engine.
        draft: the draft in speculators' format.

    Raises:
        ConfigError: the engine's layout cannot express it.
        EngineError: the engine's ids for the taps are not known.
    """
    engine = find_engine(name)
    if engine.layout is None:
        return draft
    taps = read_config(draft)["eagle_aux_hidden_state_layer_ids"]
    numbers = engine.numbering.numbers(taps, context.target.shape, context.versions.get(name))
    return engine.layout.write(draft, context.scratch / f"{name}-{numbers.version}" / draft.name, numbers)


def layouts(context: RoundContext, published: str) -> tuple[Layout, ...]:
    """What is published of this round's draft, which is trained.

    Args:
        published: URL of the draft's published folder, which has one subfolder a layout.
    """
    config = json.loads(context.store.get(f"{context.prefix('draft')}/config.json"))
    return tuple(_layout(context, name, config, f"{published}/{name}") for name in ENGINES)


def _layout(context: RoundContext, name: EngineName, config: Mapping[str, Any], folder: str) -> Layout:
    engine, taps = find_engine(name), context.config.extract.taps
    if engine.layout is None:
        return Layout(engine=name, published=folder, layer_ids=taps)
    try:
        numbers = engine.numbering.numbers(taps, context.target.shape, context.versions.get(name))
    except EngineError as error:
        return Layout(engine=name, why_not=error.what)
    reason = wrapper_fault(engine, context.target) or engine.layout.inexpressible(config, numbers.version)
    if reason:
        return Layout(engine=name, why_not=reason)
    numbers = numbers.from_version(engine.layout.first_version(config))
    return Layout(
        engine=name, published=folder, layer_ids=numbers.ids, made_for=numbers.version, holds_for=numbers.range
    )


def layout_note(
    name: EngineName,
    taps: Sequence[int],
    shape: TargetShape,
    version: str | None,
    draft: Mapping[str, Any],
    target: Target | None = None,
) -> str | None:
    """What the plan says of an engine's own layout: the taps in its numbering, or why there will be none.

    Args:
        name: the engine.
        draft: what is known of the draft's config.json before it is trained.
        target: the target; None while it is not here.

    Returns:
        A clause; None for an engine that loads the draft as the trainer writes it.
    """
    engine = find_engine(name)
    if engine.layout is None:
        return None
    none = f"the draft will not be published in {engine.title}'s layout"
    try:
        numbers = engine.numbering.numbers(taps, shape, version)
    except EngineError as error:
        return f"{none}: {error.what}"
    wrapped = wrapper_fault(engine, target) if target is not None else None
    if reason := wrapped or engine.layout.inexpressible(draft, numbers.version):
        return f"{none}: {reason}"
    numbers = numbers.from_version(engine.layout.first_version(draft))
    said, ids = (", ".join(map(str, found)) for found in (numbers.taps, numbers.ids))
    holds = f"so numbered: {numbers.range}" if target is None else f"the layout holds for {numbers.range}"
    return f"taps {said} are layer ids {ids} of {name} {numbers.version} ({holds})"
