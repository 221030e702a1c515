"""Between taps and the layer ids that an engine understands.

Tap k is the residual stream that enters decoder layer k; tap L is the last layer's output before the final norm.
What an engine captures for an id depends on engine, version and model family, so every rule is a row of
:data:`RULES` with its source, and what no row covers is refused. The convention gate then proves the row by measuring.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from infra.config.version import Version, dotted, read_version
from infra.errors import ConfigError, EngineError


@dataclass(frozen=True)
class Unless:
    """Lists of ids that an engine reads in another way than the rest of them.

    Args:
        when: which lists: those whose first id is 1, or whose largest id is the number of layers L.
        offset: engine id minus tap for these lists.
    """

    when: Literal["first is 1", "largest is L"]
    offset: int

    def covers(self, ids: Sequence[int], layers: int) -> bool:
        """Whether the engine reads ``ids`` in this way."""
        return ids[0] == 1 if self.when == "first is 1" else max(ids) == layers


@dataclass(frozen=True)
class Rule:
    """How one engine numbers captured layers for some families.

    Args:
        engine: the engine's name.
        families: config.json's ``model_type`` of the (text part of the) target.
        since: first version, (major, minor, patch), the row holds for.
        until: last version, (major, minor, patch), included.
        offset: engine id minus tap.
        lowest_tap: lowest tap that can be captured.
        final: "id": tap L is asked for by its own id; "none": it cannot be asked for.
        source: where this was read or what was run.
        unless: lists of ids that the engine reads in another way.
    """

    engine: str
    families: tuple[str, ...]
    since: Version
    until: Version
    offset: int
    lowest_tap: int
    final: Literal["id", "none"]
    source: str
    unless: Unless | None = None


_VLLM_CALLS = (
    "_maybe_add_hidden_state is called with the number of the first layer before the layers, and with idx + 1 after "
    "layer idx (read in 0.24.0, 0.32.0 and 0.33.0)"
)
_SGLANG_CALLS = (
    "set_eagle3_layers_to_capture adds 1 to given ids, and the stream that enters a captured layer is kept; the last "
    "layer's output enters none, and id -1 is refused or crashes (read in 0.5.14 to 0.5.23)"
)

RULES: tuple[Rule, ...] = (
    Rule(
        "vllm", ("llama", "mistral"), (0, 24, 0), (0, 33, 999), 0, 0, "id",
        "0.24.0 and 0.32.0 equal transformers on SmolLM2 at taps 2, 15, 27 and 30 (run); models/llama.py: "
        + _VLLM_CALLS,
    ),
    Rule(
        "vllm", ("qwen2", "qwen3"), (0, 24, 0), (0, 33, 999), 0, 0, "id",
        "0.24.0 equals transformers on random weights at taps 2, 4, 5 and 8 (run, H200); models/qwen2.py, used by "
        "qwen3.py: " + _VLLM_CALLS,
    ),
    Rule(
        "vllm", ("qwen3_moe",), (0, 24, 0), (0, 33, 999), 0, 0, "id",
        "0.24.0 equals transformers on random weights at taps 2, 4, 5 and 8, on one GPU and on two (run, H200); "
        "models/qwen3_moe.py: " + _VLLM_CALLS,
    ),
    Rule("vllm", ("gpt_oss",), (0, 24, 0), (0, 33, 999), 0, 0, "id", "models/gpt_oss.py: " + _VLLM_CALLS),
    Rule(
        "vllm", ("minimax_m2",), (0, 32, 0), (0, 32, 999), 0, 0, "id",
        "models/minimax_m2.py: the calls of the other families (read in 0.32.0)",
    ),
    Rule(
        "vllm", ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"), (0, 32, 0), (0, 33, 999), 0, 1, "id",
        "models/deepseek_v2.py adds hidden_states + residual before layer idx (layer 0 has none yet) and, for L, "
        "after the last layer (read in 0.32.0 and 0.33.0)",
    ),
    Rule(
        "sglang", ("llama", "mistral"), (0, 5, 14), (0, 5, 23), -1, 1, "none",
        "0.5.17 (H200) and 0.5.23 (CPU) equal transformers on SmolLM2 at taps 2, 15 and 27 (run); models/llama.py: "
        + _SGLANG_CALLS,
    ),
    Rule(
        "sglang", ("qwen2", "qwen3"), (0, 5, 14), (0, 5, 23), -1, 1, "none",
        "0.5.17 equals transformers on random weights at taps 2, 4 and 5 (run, H200); models/qwen2.py and qwen3.py: "
        + _SGLANG_CALLS,
    ),
    Rule(
        "sglang", ("qwen2_moe", "qwen3_moe"), (0, 5, 14), (0, 5, 23), -1, 1, "none",
        "0.5.17 equals transformers on random weights at taps 2, 4 and 5, on one GPU and on two (run, H200); "
        "models/qwen2_moe.py and qwen3_moe.py: " + _SGLANG_CALLS,
    ),
    Rule("sglang", ("glm4_moe",), (0, 5, 14), (0, 5, 23), -1, 1, "none", "models/glm4_moe.py: " + _SGLANG_CALLS),
    Rule("sglang", ("minimax_m2",), (0, 5, 14), (0, 5, 23), -1, 1, "none", "models/minimax_m2.py: " + _SGLANG_CALLS),
    Rule(
        "sglang", ("gpt_oss",), (0, 5, 14), (0, 5, 16), -1, 1, "none",
        "models/gpt_oss.py: " + _SGLANG_CALLS,
    ),
    Rule(
        "sglang", ("gpt_oss",), (0, 5, 17), (0, 5, 23), -1, 1, "none",
        "models/gpt_oss.py: as before, but ids whose largest is L are taken as they are, with the last layer's output "
        "(read in 0.5.17 to 0.5.23; unproven: 0.5.17 left transformers from layer 2 on with random weights, H200)",
        Unless("largest is L", 0),
    ),
    Rule(
        "sglang", ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"), (0, 5, 14), (0, 5, 23), 0, 1, "none",
        "0.5.17 equals transformers on random weights, ids 1, 3, 4 giving taps 2, 4, 5 and ids 3, 4, 5 themselves "
        "(run, H200); models/deepseek_v2.py, to which kimi_k25.py hands on: set_eagle3_layers_to_capture takes ids as "
        "they are, but adds 1 when the first id is 1 (read in 0.5.14 to 0.5.23; until 0.5.10 it always added 1, pull "
        "request 25454)",
        Unless("first is 1", -1),
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
        EngineError: no rule covers engine, version and family, or the taps cannot be asked for.
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
    wanted = (*taps, layers) if rule.final == "id" else tuple(taps)
    ids = tuple(tap + rule.offset for tap in wanted)
    if (found := _taps(rule, ids, layers)) != wanted:
        raise EngineError(
            f"taps {list(taps)} cannot be captured by {engine} {version} from a {family} target: it reads ids "
            f"{list(ids)} as taps {list(found)}",
            expected="a list of taps that does not begin with 1",
            fix="choose another first tap, as [2, L // 2, L - 3]",
        )
    return ids


def taps_of(engine: str, version: str, family: str, ids: Sequence[int], layers: int) -> tuple[int, ...]:
    """Taps that ``engine`` captures for ``ids`` (the inverse of :func:`engine_layer_ids`, tap L included if asked for).

    Args:
        ids: the engine's ids in the order they are handed over, at least one.
        layers: number of decoder layers L.

    Raises:
        EngineError: no rule covers engine, version and family.
    """
    return _taps(find_rule(engine, version, family), ids, layers)


def find_rule(engine: str, version: str, family: str) -> Rule:
    """The row for an engine, its version and a model family.

    Raises:
        EngineError: there is none, or the version cannot be read.
    """
    try:
        number = read_version(version)
    except ConfigError as error:
        raise EngineError(error.what, expected=error.expected) from error
    of_family = [rule for rule in RULES if rule.engine == engine and family in rule.families]
    for rule in of_family:
        if rule.since <= number <= rule.until:
            return rule
    known = sorted({name for rule in RULES if rule.engine == engine for name in rule.families})
    versions = [f"{dotted(rule.since)} to {dotted(rule.until)}" for rule in of_family]
    raise EngineError(
        f"how {engine} {version} numbers the captured layers of a {family!r} target is not known",
        expected=f"{engine} {' or '.join(versions)}"
        if versions
        else f"one of the families {known} for engine {engine!r}",
        fix="read the engine's source for this family, add a row with its source to infra/engines/layer_ids.py, "
        "and let the convention gate prove it",
    )


def _taps(rule: Rule, ids: Sequence[int], layers: int) -> tuple[int, ...]:
    unless = rule.unless
    offset = unless.offset if unless is not None and unless.covers(ids, layers) else rule.offset
    return tuple(number - offset for number in ids)
