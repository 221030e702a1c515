"""The draft in the layouts of the engines that can serve it, and why it is not in one of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.config.round import RoundConfig, TargetShape
from infra.config.settings import Settings
from infra.config.version import dotted
from infra.drafter.checkpoint import read_config
from infra.drafter.sglang_format import LayerNumbers, inexpressible, write_sglang
from infra.engines.layer_ids import RULES, engine_layer_ids, find_rule
from infra.engines.registry import engine_version
from infra.errors import EngineError, EnvironmentBuildError
from infra.results import Layout
from infra.round.context import Round

NO_CPU_SERVING = (
    "SGLang cannot serve an EAGLE-3 draft on the CPU (its draft backend wants kernels that no wheel has): "
    "set serve_with: vllm, or engines.sglang.device: cuda"
)


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
    if reason := inexpressible(config, numbers.version):
        return plain, Layout(engine="sglang", why_not=reason)
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


def sglang_version(config: RoundConfig, settings: Settings) -> str | None:
    """The installed SGLang, when the round uses it and it is installed."""
    if "sglang" not in config.used_engines:
        return None
    try:
        return engine_version("sglang", config.engines["sglang"].device, settings)
    except (EngineError, EnvironmentBuildError):
        return None


def sglang_faults(config: RoundConfig, shape: TargetShape, version: str | None, serves: bool = True) -> list[str]:
    """What SGLang cannot do of what the round asks of it; empty where the round does not use it.

    Args:
        version: the installed SGLang; None: taken as the newest one that is known.
        serves: whether drafts will be served; False where hidden states are all that is wanted.
    """
    if "sglang" not in config.used_engines:
        return []
    try:
        numbers = sglang_numbers(config.extract.taps, shape, version)
    except EngineError as error:
        return [str(error)]
    if not serves or config.serve_with != "sglang":
        return []
    found = [NO_CPU_SERVING] if config.engines["sglang"].device == "cpu" else []
    if reason := inexpressible(planned_draft(config), numbers.version):
        found.append(f"{reason}: set serve_with: vllm, or train without it")
    return found


def layout_note(config: RoundConfig, shape: TargetShape, version: str | None) -> str:
    """What the plan says of SGLang's layout: the taps in its numbering, or why there will be none."""
    try:
        numbers = sglang_numbers(config.extract.taps, shape, version)
    except EngineError as error:
        return f"the draft will not be published in SGLang's layout: {error.what}"
    if reason := inexpressible(planned_draft(config), numbers.version):
        return f"the draft will not be published in SGLang's layout: {reason}"
    taps, ids = (", ".join(map(str, numbers)) for numbers in (numbers.taps, numbers.ids))
    return f"taps {taps} are layer ids {ids} of sglang {numbers.version} (so numbered: {numbers.range})"


def planned_draft(config: RoundConfig) -> Mapping[str, Any]:
    """What is known of the draft's config.json before it is trained."""
    return {"norm_before_fc": config.train.norm_before_fc, "norm_output": config.train.norm_output}


def _newest(engine: str, family: str) -> str:
    known = [rule.until for rule in RULES if rule.engine == engine and family in rule.families]
    if not known:
        raise EngineError(
            f"how {engine} numbers the captured layers of a {family!r} target is not known",
            fix="add a row with its source to infra/engines/layer_ids.py",
        )
    return dotted(max(known))
