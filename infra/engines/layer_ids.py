"""Between taps and the layer ids that an engine understands.

Tap k is the residual stream that enters decoder layer k; tap L is the last layer's output before the final norm.
What an engine captures for an id depends on engine, version and model family, so every rule is a row of
:data:`RULES` with its source, and what no row covers is refused. The convention gate then proves the row by measuring.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from infra.errors import EngineError


@dataclass(frozen=True)
class Rule:
    """How one engine numbers captured layers for some families.

    Args:
        engine: the engine's name.
        families: config.json's ``model_type`` of the (text part of the) target.
        since: first version, (major, minor), the row holds for.
        until: last version, (major, minor), included.
        offset: engine id minus tap.
        lowest_tap: lowest tap that can be captured.
        final: "id": tap L is asked for by its own id; "none": it cannot be asked for.
        source: where this was read or what was run.
    """

    engine: str
    families: tuple[str, ...]
    since: tuple[int, int]
    until: tuple[int, int]
    offset: int
    lowest_tap: int
    final: Literal["id", "none"]
    source: str


_SAME_CALLS = (
    "_maybe_add_hidden_state is called with the number of the first layer before the layers, and with idx + 1 after "
    "layer idx (read in 0.32.0 and 0.33.0)"
)

RULES: tuple[Rule, ...] = (
    Rule(
        "vllm", ("llama", "mistral"), (0, 24), (0, 33), 0, 0, "id",
        "0.32.0 equals transformers on SmolLM2 at taps 2, 15, 27 and 30 (run); models/llama.py: " + _SAME_CALLS,
    ),
    Rule("vllm", ("qwen2", "qwen3"), (0, 32), (0, 33), 0, 0, "id", "models/qwen2.py, used by qwen3.py: " + _SAME_CALLS),
    Rule("vllm", ("qwen3_moe",), (0, 32), (0, 33), 0, 0, "id", "models/qwen3_moe.py: " + _SAME_CALLS),
    Rule("vllm", ("gpt_oss",), (0, 32), (0, 33), 0, 0, "id", "models/gpt_oss.py: " + _SAME_CALLS),
    Rule(
        "vllm", ("deepseek_v3", "kimi_k2", "kimi_k25"), (0, 32), (0, 33), 0, 1, "id",
        "models/deepseek_v2.py adds hidden_states + residual before layer idx (layer 0 has none yet) and, for L, "
        "after the last layer (read in 0.32.0 and 0.33.0)",
    ),
)  # fmt: skip


def engine_layer_ids(engine: str, version: str, family: str, taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """Ids that make ``engine`` capture ``taps`` and, where it can be asked for, tap L as the last one.

    Args:
        engine: the engine's name.
        version: its version, e.g. "0.32.0".
        family: the target's ``model_type``.
        taps: taps, ascending, different, each below ``layers``.
        layers: number of decoder layers L.

    Raises:
        EngineError: no rule covers engine, version and family, or a tap cannot be captured.
    """
    rule = find_rule(engine, version, family)
    if not taps or list(taps) != sorted(set(taps)):
        raise EngineError(f"taps {list(taps)} cannot be captured", expected="ascending, different taps")
    for tap in taps:
        if not rule.lowest_tap <= tap < layers:
            raise EngineError(
                f"tap {tap} cannot be captured by {engine} {version} from a {family} target of {layers} layers",
                expected=f"taps from {rule.lowest_tap} to {layers - 1}; tap {layers} is added where the engine has it",
            )
    ids = tuple(tap + rule.offset for tap in taps)
    return (*ids, layers + rule.offset) if rule.final == "id" else ids


def taps_of(engine: str, version: str, family: str, ids: Sequence[int]) -> tuple[int, ...]:
    """Taps that ``engine`` captures for ``ids`` (the inverse of :func:`engine_layer_ids`, tap L included if asked for).

    Raises:
        EngineError: no rule covers engine, version and family.
    """
    rule = find_rule(engine, version, family)
    return tuple(number - rule.offset for number in ids)


def find_rule(engine: str, version: str, family: str) -> Rule:
    """The row for an engine, its version and a model family.

    Raises:
        EngineError: there is none, or the version cannot be read.
    """
    number = _major_minor(version)
    of_family = [rule for rule in RULES if rule.engine == engine and family in rule.families]
    for rule in of_family:
        if rule.since <= number <= rule.until:
            return rule
    known = sorted({name for rule in RULES if rule.engine == engine for name in rule.families})
    versions = [f"{_dotted(rule.since)} to {_dotted(rule.until)}" for rule in of_family]
    raise EngineError(
        f"how {engine} {version} numbers the captured layers of a {family!r} target is not known",
        expected=f"{engine} {' or '.join(versions)}"
        if versions
        else f"one of the families {known} for engine {engine!r}",
        fix="read the engine's source for this family, add a row with its source to infra/engines/layer_ids.py, "
        "and let the convention gate prove it",
    )


def _major_minor(version: str) -> tuple[int, int]:
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        raise EngineError(f"the engine version {version!r} cannot be read", expected="a version like 0.32.0")
    return int(parts[0]), int(parts[1])


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
