"""A draft in SGLang's layout, made from the one that speculators (and vLLM) read.

Read in SGLang 0.5.14 to 0.5.23: models/llama_eagle3.py (constructor and ``load_weights``),
model_executor/model_runner_components/spec_aux_hidden_state.py (0.5.14 to 0.5.16: model_executor/model_runner.py) for
``eagle_config``, and ``init_lm_head`` of speculative/eagle_worker_v2.py; in 0.5.14 to 0.5.17 and 0.5.23:
layers/rotary_embedding. SGLang skips tensors it does not know and leaves those it misses as they happen to be in
memory, both without a word, so every name is checked here.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from infra.config.version import Version, dotted, read_version
from infra.engines.draft import WEIGHTS, DraftLayout, read_config, write_draft
from infra.engines.layer_ids import LayerNumbers
from infra.errors import ConfigError, TrainingError

PROVENANCE = "eagle3.json"
LEFT_OUT = frozenset({"t2d", "embed_tokens.weight"})
"""``t2d`` is skipped by SGLang's loader; the embedding is the target's own, which SGLang puts in the draft's place."""
NOT_CARRIED = frozenset({"layer_types", "sliding_window", "use_sliding_window", "num_aux_hidden_states"})
"""Fields of the layer config that say nothing of a draft with full attention, but might switch a window on."""
NORM_BEFORE_FC_SINCE = (0, 5, 17)
YARN_MSCALE_SINCE = (0, 5, 16)
"""Until 0.5.15 YaRN's ``mscale`` and ``mscale_all_dim`` are ignored (layers/rotary_embedding/factory.py)."""
ROPE_TYPES = frozenset({"default", "linear", "dynamic", "llama3", "yarn"})


def needed(config: Mapping[str, Any]) -> dict[str, Version]:
    """What of a draft is understood only from a version of SGLang on: what it is -> that version."""
    rope = config.get("transformer_layer_config", {}).get("rope_parameters") or {}
    found: dict[str, Version] = {}
    if config.get("norm_before_fc", False):
        found["norm_before_fc"] = NORM_BEFORE_FC_SINCE
    if _same(_trained_attention_factor(rope), _served_attention_factor(rope, YARN_MSCALE_SINCE)) and not _same(
        _trained_attention_factor(rope), _served_attention_factor(rope, (0, 0, 0))
    ):
        found["YaRN with mscale and mscale_all_dim"] = YARN_MSCALE_SINCE
    return found


def first_version(config: Mapping[str, Any]) -> Version:
    """The first version of SGLang that reads all of a draft's config as it was trained."""
    return max(needed(config).values(), default=(0, 0, 0))


def _trained_attention_factor(rope: Mapping[str, Any]) -> float:
    """What rotary cosines and sines are multiplied by in training (transformers' ``_compute_yarn_parameters``)."""
    if rope.get("rope_type") != "yarn":
        return 1.0
    if (said := rope.get("attention_factor")) is not None:
        return float(said)
    factor, mscale, all_dim = rope.get("factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)
    return _yarn_mscale(factor)


def _served_attention_factor(rope: Mapping[str, Any], version: Version) -> float:
    """The same in SGLang (``YaRNScalingRotaryEmbedding``), which does not know ``attention_factor``."""
    if rope.get("rope_type") != "yarn":
        return 1.0
    factor, mscale, all_dim = rope.get("factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    more = float(rope.get("attn_factor") or 1.0)
    if version >= YARN_MSCALE_SINCE and mscale is not None and all_dim is not None:
        return more * _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)
    return more * _yarn_mscale(factor)


def _yarn_mscale(factor: float | None, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor and factor > 1 else 1.0


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)


def inexpressible(config: Mapping[str, Any], version: str) -> str:
    """What SGLang cannot express of a draft, in one sentence; "" when it can serve it as it is.

    Args:
        config: config.json of a draft in speculators' format, or the part of it that is known before training.
        version: SGLang's version, e.g. "0.5.23".

    Raises:
        ConfigError: what it says depends on the version, which cannot be read.
    """
    layer = config.get("transformer_layer_config", {})
    width, rope = layer.get("hidden_size"), layer.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    later = {
        f"{name} (known from SGLang {dotted(since)} on)": read_version(version) < since
        for name, since in needed(config).items()
    }
    found = later | {
        "norm_before_residual (SGLang keeps the residual as it was before the norm)": config.get(
            "norm_before_residual", False
        ),
        "fc_norm (no name of its tensors is known here)": config.get("fc_norm", False),
        "embed_requires_grad (SGLang puts the target's embedding in the draft's place)": config.get(
            "embed_requires_grad", False
        ),
        "target_hidden_size (a draft of another width than its target)": config.get("target_hidden_size")
        not in (None, width),
        f"layers of type {layer.get('model_type')} (its draft layers are Llama's)": layer.get("model_type", "llama")
        != "llama",
        "attention_bias (its draft layers have no biases)": layer.get("attention_bias", False),
        "mlp_bias (its draft layers have no biases)": layer.get("mlp_bias", False),
        f"hidden_act {layer.get('hidden_act')} (it knows silu only)": layer.get("hidden_act", "silu") != "silu",
        "sliding windows": "sliding_attention" in (layer.get("layer_types") or ()),
        f"rotary positions of type {kind} (no reading of it was compared)": kind not in ROPE_TYPES,
        "YaRN with an attention_factor, or without a factor": not _same(
            _trained_attention_factor(rope), _served_attention_factor(rope, YARN_MSCALE_SINCE)
        )
        or (kind == "yarn" and not rope.get("factor")),
    }
    names = [name for name, is_so in found.items() if is_so]
    return f"SGLang {version} cannot express {', '.join(names)}" if names else ""


def tensor_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Every tensor that SGLang's loader needs: its name in speculators' file -> its name in SGLang's.

    Layers after the first are plain Llama layers in speculators; SGLang's have the norm in front of the attention under
    another name (``hidden_norm``).
    """
    layer = config["transformer_layer_config"]
    names = {name: name for name in ("fc.weight", "norm.weight", "lm_head.weight")}
    if config["draft_vocab_size"] != layer["vocab_size"]:
        names["d2t"] = "d2t"
    if config.get("norm_before_fc"):
        names["input_norm.weight"] = "input_norm.weight"
    parts = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    for number in range(layer["num_hidden_layers"]):
        prefix = f"layers.{number}"
        for part in (*parts, "post_attention_layernorm"):
            names[f"{prefix}.{part}.weight"] = f"{prefix}.{part}.weight"
        norm = f"{prefix}.input_layernorm.weight"
        names[norm] = norm if number == 0 else f"{prefix}.hidden_norm.weight"
    names["layers.0.hidden_norm.weight"] = "layers.0.hidden_norm.weight"
    return names


def write_sglang(draft: Path, out: Path, numbers: LayerNumbers) -> Path:
    """Write the folder ``out`` that SGLang loads as ``--speculative-draft-model-path``; it appears whole.

    Args:
        draft: the draft in speculators' format, as :func:`infra.drafter.checkpoint.publishable` writes it.
        out: the new folder; an earlier one is replaced.
        numbers: the draft's taps in SGLang's numbering.

    Raises:
        ConfigError: SGLang cannot express the draft; the first fields that it lacks are named.
        TrainingError: the draft has other taps than ``numbers``, or not the tensors that SGLang's loader needs.
    """
    config = read_config(draft)
    if reason := inexpressible(config, numbers.version):
        raise ConfigError(reason, fix="serve the draft with vllm, or train it without that")
    taps = tuple(config["eagle_aux_hidden_state_layer_ids"])
    if taps != numbers.taps:
        raise TrainingError(f"the draft in {draft} was trained on taps {list(taps)}", expected=f"{list(numbers.taps)}")
    weights, names = load_file(draft / WEIGHTS), tensor_names(config)
    wrong = (weights.keys() - LEFT_OUT) ^ names.keys()
    if wrong:
        raise TrainingError(
            f"the draft in {draft} has not the tensors that SGLang loads: {', '.join(sorted(wrong))} missing or unknown"
        )
    numbers = numbers.from_version(first_version(config))
    texts = {
        "config.json": _json(sglang_config(config, numbers.ids)),
        PROVENANCE: _json(
            {
                "engine": "sglang",
                "engine_version": numbers.version,
                "layer_ids": numbers.ids,
                "layer_ids_hold_for": {"since": numbers.since, "until": numbers.until},
                "taps": numbers.taps,
                "made_from": {WEIGHTS: _sha256(draft / WEIGHTS)},
            }
        ),
    }
    return write_draft(out, {names[name]: weights[name] for name in names}, texts)


def sglang_config(config: Mapping[str, Any], ids: tuple[int, ...]) -> dict[str, Any]:
    """SGLang's config.json: the layer config at the top, layer ids only where SGLang looks for them (nested)."""
    layer = {name: value for name, value in config["transformer_layer_config"].items() if name not in NOT_CARRIED}
    return {
        **layer,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["draft_vocab_size"],
        "dtype": config["dtype"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(ids),
            "norm_before_fc": bool(config.get("norm_before_fc")),
            "use_aux_hidden_state": True,
        },
        "norm_output": bool(config.get("norm_output")),
        "num_aux_hidden_states": len(ids),
        "tie_word_embeddings": False,
    }


def _json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


LAYOUT = DraftLayout(inexpressible, first_version, write_sglang, embeds=False)
