"""A draft in SGLang's layout: what SGLang's reading rules make of it, and what is refused instead of read wrongly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from standin import sglang_reader
from standin.speculators_draft import NUMBERS, PROPOSED, VOCABULARY, draft_config, draft_weights, write_draft

from infra.engines.sglang.draft import inexpressible, write_sglang
from infra.errors import ConfigError, TrainingError


@pytest.mark.parametrize(
    ("layers", "proposed", "changes"),
    [
        (1, PROPOSED, {}),
        (1, VOCABULARY, {}),
        (2, PROPOSED, {}),
        (1, PROPOSED, {"norm_before_fc": True, "norm_output": True}),
    ],
)
def test_sglang_reads_every_tensor_into_its_place(
    tmp_path: Path, layers: int, proposed: int, changes: dict[str, Any]
) -> None:
    fields = draft_config(layers, proposed, **changes)
    out = write_sglang(write_draft(tmp_path / "draft", fields), tmp_path / "out", NUMBERS)
    read, ours = sglang_reader.read(out), load_file(tmp_path / "draft" / "model.safetensors")

    assert read.architectures == ["LlamaForCausalLMEagle3"]
    assert read.ids == [1, 14, 26]
    assert read.norm_output is changes.get("norm_output", False)
    unused = {f"model.layers.{number}.input_layernorm.weight" for number in range(1, layers)}
    assert read.unfilled == {"model.embed_tokens.weight"} | unused
    for name in ("fc", "norm", *(("input_norm",) if changes else ())):
        assert torch.equal(read.parameters[f"model.{name}.weight"], ours[f"{name}.weight"].float())
    assert torch.equal(read.parameters["lm_head.weight"], ours["lm_head.weight"].float())
    for number in range(layers):
        theirs, mine = f"model.layers.{number}", f"layers.{number}"
        for stacked, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            block = stacked.split(".")[0]
            joined = torch.cat([ours[f"{mine}.{block}.{part}_proj.weight"] for part in parts]).float()
            assert torch.equal(read.parameters[f"{theirs}.{stacked}_proj.weight"], joined)
        for name in ("self_attn.o_proj", "mlp.down_proj", "post_attention_layernorm"):
            assert torch.equal(read.parameters[f"{theirs}.{name}.weight"], ours[f"{mine}.{name}.weight"].float())
        # The norm in front of the attention: speculators calls it input_layernorm after the first layer.
        state_norm = "hidden_norm" if number == 0 else "input_layernorm"
        assert torch.equal(read.parameters[f"{theirs}.hidden_norm.weight"], ours[f"{mine}.{state_norm}.weight"].float())
    first = "layers.0.input_layernorm.weight"
    assert torch.equal(read.parameters[f"model.{first}"], ours[first].float())
    if proposed == PROPOSED:
        assert read.hot_token_id is not None
        assert torch.equal(read.hot_token_id, torch.arange(PROPOSED) + ours["d2t"])
    else:
        assert read.hot_token_id is None


def test_the_folder_says_what_its_ids_mean_and_where_it_comes_from(tmp_path: Path) -> None:
    out = write_sglang(write_draft(tmp_path / "draft", draft_config()), tmp_path / "out", NUMBERS)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "eagle3.json", "model.safetensors"]
    said = json.loads((out / "eagle3.json").read_text())
    assert said["taps"] == [2, 15, 27]
    assert said["layer_ids"] == [1, 14, 26]
    assert said["engine_version"] == "0.5.23"
    assert said["layer_ids_hold_for"] == {"since": "0.5.14", "until": "0.5.23"}
    written = json.loads((out / "config.json").read_text())
    assert "eagle_aux_hidden_state_layer_ids" not in written, "vLLM reads the key at the top, in its own numbering"
    assert "sliding_window" not in written
    assert "org/target" not in json.dumps(written)


@pytest.mark.parametrize(
    ("changes", "layer", "said"),
    [
        ({"norm_before_residual": True}, {}, "norm_before_residual"),
        ({"fc_norm": True}, {}, "fc_norm"),
        ({"embed_requires_grad": True}, {}, "embed_requires_grad"),
        ({"target_hidden_size": 32}, {}, "target_hidden_size"),
        ({}, {"model_type": "qwen3"}, "layers of type qwen3"),
        ({}, {"attention_bias": True}, "attention_bias"),
        ({}, {"mlp_bias": True}, "mlp_bias"),
        ({}, {"hidden_act": "gelu"}, "hidden_act gelu"),
        ({}, {"layer_types": ["sliding_attention"]}, "sliding windows"),
    ],
)
def test_what_sglang_cannot_express_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], layer: dict[str, Any], said: str
) -> None:
    fields = draft_config(**changes)
    fields["transformer_layer_config"] |= layer
    with pytest.raises(ConfigError, match=f"SGLang 0.5.23 cannot express {said}"):
        write_sglang(write_draft(tmp_path / "draft", fields), tmp_path / "out", NUMBERS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("version", "refused"), [("0.5.16", True), ("0.5.17", False), ("0.5.23", False)])
def test_the_norm_before_fc_is_known_from_0_5_17_on(version: str, refused: bool) -> None:
    assert ("norm_before_fc" in inexpressible(draft_config(norm_before_fc=True), version)) is refused


def test_a_version_that_cannot_be_read_is_no_old_one() -> None:
    with pytest.raises(ConfigError, match="the engine version 'main' cannot be read"):
        inexpressible(draft_config(norm_before_fc=True), "main")


@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
def test_a_draft_as_it_is_trained_here_is_expressible(version: str) -> None:
    assert inexpressible(draft_config(norm_output=True), version) == ""


def test_a_missing_or_unknown_tensor_is_named(tmp_path: Path) -> None:
    tensors = draft_weights(draft_config())
    tensors["layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    del tensors["d2t"]
    folder = write_draft(tmp_path / "draft", draft_config(), tensors)
    with pytest.raises(TrainingError, match=r"d2t, layers\.0\.self_attn\.q_proj\.bias missing or unknown"):
        write_sglang(folder, tmp_path / "out", NUMBERS)


def test_ids_of_other_taps_are_refused(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", draft_config(eagle_aux_hidden_state_layer_ids=[1, 14, 26]))
    with pytest.raises(TrainingError, match=r"trained on taps \[1, 14, 26\].*\[2, 15, 27\]"):
        write_sglang(folder, tmp_path / "out", NUMBERS)
