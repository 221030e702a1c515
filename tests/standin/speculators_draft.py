"""A small draft's folder as speculators 0.9.0 writes it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from infra.engines.layer_ids import LayerNumbers

HIDDEN, WIDE, VOCABULARY, PROPOSED = 16, 24, 40, 12
NUMBERS = LayerNumbers("0.5.23", "0.5.14", "0.5.23", taps=(2, 15, 27), ids=(1, 14, 26))
"""SGLang's layer numbers for the taps of :func:`draft_config`."""


def draft_config(layers: int = 1, proposed: int = PROPOSED, **changes: Any) -> dict[str, Any]:
    """A draft's config.json: so many layers and proposed tokens; ``changes`` replace its top-level keys."""
    layer = {
        "model_type": "llama", "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers,
        "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 4, "vocab_size": VOCABULARY, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "mlp_bias": False, "sliding_window": 8, "num_aux_hidden_states": 3, "tie_word_embeddings": False,
        "max_position_embeddings": 512, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
    }  # fmt: skip
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": proposed,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
        "norm_before_residual": False,
        "target_hidden_size": None,
        "transformer_layer_config": layer,
        "speculators_config": {"verifier": {"name_or_path": "org/target"}},
        **changes,
    }


def draft_weights(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of a draft as speculators 0.9.0 names them, every one with values of its own."""
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    found = {
        "embed_tokens.weight": some(VOCABULARY, HIDDEN),
        "fc.weight": some(HIDDEN, 3 * HIDDEN),
        "norm.weight": some(HIDDEN),
        "lm_head.weight": some(fields["draft_vocab_size"], HIDDEN),
        "layers.0.hidden_norm.weight": some(HIDDEN),
    }
    if fields.get("norm_before_fc"):
        found["input_norm.weight"] = some(3 * HIDDEN)
    if fields["draft_vocab_size"] != VOCABULARY:
        found["d2t"] = torch.arange(PROPOSED)
        found["t2d"] = torch.arange(VOCABULARY) % 2 == 0
    for number in range(fields["transformer_layer_config"]["num_hidden_layers"]):
        prefix, inner = f"layers.{number}", HIDDEN * (2 if number == 0 else 1)
        for name, rows in (("q", 16), ("k", 8), ("v", 8)):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = some(rows, inner)
        found[f"{prefix}.self_attn.o_proj.weight"] = some(HIDDEN, 16)
        found |= {f"{prefix}.mlp.{name}_proj.weight": some(WIDE, HIDDEN) for name in ("gate", "up")}
        found[f"{prefix}.mlp.down_proj.weight"] = some(HIDDEN, WIDE)
        found |= {f"{prefix}.{name}.weight": some(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
    return found


def write_draft(folder: Path, fields: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A draft's folder, made here; with the tensors that its config asks for unless others are given."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(draft_weights(fields) if tensors is None else tensors, folder / "model.safetensors")
    return folder
