"""The draft in the layouts of the engines that can serve it, and why it is not in one of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.config.round import TargetShape
from infra.config.version import dotted
from infra.drafter.checkpoint import read_config
from infra.drafter.sglang_format import LayerNumbers, inexpressible, write_sglang
from infra.engines.layer_ids import RULES, engine_layer_ids, find_rule
from infra.engines.limits import wrapper_fault
from infra.errors import EngineError
from infra.results import Layout
from infra.round.context import Round
from infra.targets.target import Target


def draft_folder(round_: Round) -> Path:
    """A local folder with this round's draft in speculators' format; fetched into scratch from a remote store."""
    prefix = round_.prefix("draft")
    local = round_.store.local_path(prefix)
    if local is not None:
        return local
    folder = round_.scratch / f"draft-{round_.keys.draft}"
    for item in round_.store.list(prefix):
        path = folder / item.path.removeprefix(prefix).lstrip("/")
        if not path.exists() or path.stat().st_size != item.size:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(round_.store.get(item.path))
    return folder


def served_draft(round_: Round, draft: Path) -> Path:
    """The draft as the serving engine loads it.

    Args:
        draft: the draft in speculators' format, which vLLM loads as it is.

    Raises:
        ConfigError: SGLang is to serve it and cannot express it.
        EngineError: SGLang's ids for the taps are not known.
    """
    return sglang_draft(round_, draft) if round_.config.serve_with == "sglang" else draft


def sglang_draft(round_: Round, draft: Path) -> Path:
    """A folder in scratch with the draft in SGLang's layout; raises as :func:`served_draft`."""
    taps = read_config(draft)["eagle_aux_hidden_state_layer_ids"]
    numbers = sglang_numbers(taps, round_.target.shape, round_.versions.get("sglang"))
    return write_sglang(draft, round_.scratch / f"sglang-{numbers.version}" / draft.name, numbers)


def layouts(round_: Round, published: str) -> tuple[Layout, ...]:
    """What is published of this round's draft, which is trained.

    Args:
        published: URL of the draft's published folder, which has one subfolder a layout.
    """
    config = json.loads(round_.store.get(f"{round_.prefix('draft')}/config.json"))
    plain = Layout(engine="vllm", published=f"{published}/vllm", layer_ids=round_.config.extract.taps)
    try:
        numbers = sglang_numbers(round_.config.extract.taps, round_.target.shape, round_.versions.get("sglang"))
    except EngineError as error:
        return plain, Layout(engine="sglang", why_not=error.what)
    if reason := wrapper_fault("sglang", round_.target) or inexpressible(config, numbers.version):
        return plain, Layout(engine="sglang", why_not=reason)
    numbers = numbers.for_draft(config)
    other = Layout(
        engine="sglang",
        published=f"{published}/sglang",
        layer_ids=numbers.ids,
        made_for=numbers.version,
        holds_for=numbers.range,
    )
    return plain, other


def sglang_numbers(taps: Sequence[int], shape: TargetShape, version: str | None) -> LayerNumbers:
    """Taps in SGLang's numbering.

    Args:
        taps: a draft's taps, ascending.
        shape: the target's.
        version: SGLang's version; None for the newest one whose numbering is known.

    Raises:
        EngineError: it is not known how this version numbers the layers of this family, or it cannot number a tap.
    """
    version = version or _newest("sglang", shape.family)
    rule = find_rule("sglang", version, shape.family)
    ids = engine_layer_ids("sglang", version, shape.family, taps, shape.layers)
    return LayerNumbers(version, dotted(rule.since), dotted(rule.until), tuple(taps), tuple(ids))


def layout_note(
    taps: Sequence[int], shape: TargetShape, version: str | None, draft: Mapping[str, Any], target: Target | None = None
) -> str:
    """What the plan says of SGLang's layout: the taps in its numbering, or why there will be none.

    Args:
        draft: what is known of the draft's config.json before it is trained.
        target: the target; None while it is not here.
    """
    try:
        numbers = sglang_numbers(taps, shape, version)
    except EngineError as error:
        return f"the draft will not be published in SGLang's layout: {error.what}"
    wrapped = wrapper_fault("sglang", target) if target is not None else None
    if reason := wrapped or inexpressible(draft, numbers.version):
        return f"the draft will not be published in SGLang's layout: {reason}"
    numbers = numbers.for_draft(draft)
    said, ids = (", ".join(map(str, found)) for found in (numbers.taps, numbers.ids))
    holds = f"so numbered: {numbers.range}" if target is None else f"the layout holds for {numbers.range}"
    return f"taps {said} are layer ids {ids} of sglang {numbers.version} ({holds})"


def _newest(engine: str, family: str) -> str:
    known = [rule.until for rule in RULES if rule.engine == engine and family in rule.families]
    if not known:
        raise EngineError(
            f"how {engine} numbers the captured layers of a {family!r} target is not known",
            fix="add a row with its source to infra/engines/layer_ids.py",
        )
    return dotted(max(known))
