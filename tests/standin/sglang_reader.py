"""How SGLang reads a draft's folder, written down from its source for tests.

models/llama_eagle3.py (``LlamaModel.__init__``, ``LlamaForCausalLMEagle3.load_weights``) of SGLang 0.5.23, which equals
0.5.17 in all that is here; the ids from model_runner_components/spec_aux_hidden_state.py. Shapes are those of one rank.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

STACKED = (
    (".qkv_proj", ".q_proj", "q"),
    (".qkv_proj", ".k_proj", "k"),
    (".qkv_proj", ".v_proj", "v"),
    (".gate_up_proj", ".gate_proj", "gate"),
    (".gate_up_proj", ".up_proj", "up"),
)


@dataclass(frozen=True)
class Read:
    """What SGLang has of a draft after loading: config, its parameters by its own names, and what it never filled."""

    ids: list[int] | None
    norm_output: bool
    architectures: list[str]
    parameters: dict[str, torch.Tensor]
    unfilled: set[str]
    hot_token_id: torch.Tensor | None


def read(folder: Path) -> Read:
    """Load a folder as SGLang does; a parameter that no tensor fills stays NaN."""
    config = AutoConfig.from_pretrained(folder)
    eagle = getattr(config, "eagle_config", None) or {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    parameters = {name: torch.full(shape, torch.nan) for name, shape in shapes(config, eagle).items()}
    rows = _rows(config)
    hot = None
    for original, tensor in load_file(folder / "model.safetensors").items():
        name = original.replace("midlayer", "layers.0")
        if "d2t" in name:
            hot = tensor + torch.arange(tensor.shape[0])
            continue
        if "t2d" in name:
            continue
        shard = None
        for stacked, single, part in STACKED:
            if single in name:
                name, shard = name.replace(single, stacked), part
                break
        name = name if name in parameters else f"model.{name}"
        if name in parameters:
            place = parameters[name] if shard is None else parameters[name][rows[shard]]
            assert place.shape == tensor.shape, name
            place.copy_(tensor)
    unfilled = {name for name, tensor in parameters.items() if bool(tensor.isnan().any())}
    return Read(ids, getattr(config, "norm_output", False), config.architectures, parameters, unfilled, hot)


def shapes(config: AutoConfig, eagle: dict[str, Any]) -> dict[str, list[int]]:
    """Parameters of ``LlamaForCausalLMEagle3``."""
    assert not config.tie_word_embeddings
    hidden, rows = config.hidden_size, _rows(config)
    aux = getattr(config, "num_aux_hidden_states", None) or len(eagle["eagle_aux_hidden_state_layer_ids"] or [0, 0, 0])
    found = {
        "model.embed_tokens.weight": [config.vocab_size, hidden],
        "model.fc.weight": [hidden, hidden * aux],
        "model.norm.weight": [hidden],
        "lm_head.weight": [config.draft_vocab_size, hidden],
    }
    if eagle.get("norm_before_fc", getattr(config, "norm_before_fc", False)):
        found["model.input_norm.weight"] = [hidden * aux]
    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}"
        found |= {
            f"{prefix}.self_attn.qkv_proj.weight": [rows["v"].stop, hidden * (2 if number == 0 else 1)],
            f"{prefix}.self_attn.o_proj.weight": [hidden, rows["q"].stop],
            f"{prefix}.mlp.gate_up_proj.weight": [rows["up"].stop, hidden],
            f"{prefix}.mlp.down_proj.weight": [hidden, config.intermediate_size],
            **{f"{prefix}.{name}.weight": [hidden] for name in NORMS},
        }
    return found


NORMS = ("input_layernorm", "post_attention_layernorm", "hidden_norm")


def _rows(config: AutoConfig) -> dict[str, slice]:
    """Where each part lies in its stacked parameter."""
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    wide = config.intermediate_size
    return {
        "q": slice(0, query),
        "k": slice(query, query + key),
        "v": slice(query + key, query + 2 * key),
        "gate": slice(0, wide),
        "up": slice(wide, 2 * wide),
    }
