"""The reference's states are those of transformers, whole or streamed, also of mixtures and latent attention."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen3MoeConfig

from infra.config.round import TargetConfig
from infra.config.settings import Settings
from infra.engines.reference.entry import answer_request, choose, kept_bytes
from infra.engines.reference.process import Reference, ReferenceMode, ReferenceStates, ReferenceUnavailable
from infra.engines.reference.streamed import Refused
from infra.machine.processes.guarded import recorded
from infra.targets.target import Target, open_target

SEQUENCES = [[5, 9, 2, 7, 11, 3, 30, 12, 8], [4, 4, 8], [1]]
COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
    "deepseek_v3": DeepseekV3Config(
        **(COMMON | {"num_key_value_heads": 4}), n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, n_shared_experts=1,
    ),
}  # fmt: skip


def make_target(folder: Path, family: str) -> Target:
    """A random target whose final norm is not one everywhere."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder / family)
    return open_target(TargetConfig(name=family), folder)


def by_transformers(target: Target, tokens: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(hidden_states as transformers gives them: the last one after the norm; argmax tokens)."""
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), output_hidden_states=True)
    return [layer[0] for layer in output.hidden_states], output.logits[0].argmax(-1)


def ask(target: Target, mode: ReferenceMode) -> tuple[dict[str, str], list[ReferenceStates]]:
    """What the child would answer, computed here: a process of its own costs an import of torch."""
    said, tensors = answer_request(
        {
            "target": str(target.path),
            "trust_remote_code": False,
            "mode": mode,
            "device": "cpu",
            "sequences": SEQUENCES,
        }
    )
    states = [
        ReferenceStates(
            tensors["hidden"][number, : len(tokens)],
            tensors["normed"][number, : len(tokens)],
            tensors["next_tokens"][number, : len(tokens)],
        )
        for number, tokens in enumerate(SEQUENCES if tensors else [])
    ]
    return said, states


def assert_right(target: Target, found: list[ReferenceStates]) -> None:
    weight = load_file(target.path / "model.safetensors")["model.norm.weight"]
    for tokens, states in zip(SEQUENCES, found, strict=True):
        layers, best = by_transformers(target, tokens)
        assert states.hidden.shape == (len(tokens), 4, 32)
        for tap in range(3):
            torch.testing.assert_close(states.hidden[:, tap], layers[tap], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states.normed, layers[3], rtol=1e-4, atol=1e-5)
        final = states.hidden[:, 3]
        rms = final.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
        torch.testing.assert_close(final / rms * weight, states.normed, rtol=1e-3, atol=1e-4)
        assert states.next_tokens.tolist() == best.tolist()


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_tap_is_what_transformers_computes(family: str, mode: ReferenceMode, tmp_path: Path) -> None:
    target = make_target(tmp_path, family)
    said, found = ask(target, mode)
    assert said == {"how": f"{mode}, float32 on cpu"}
    assert_right(target, found)


def test_it_computes_in_a_process_of_its_own_and_leaves_nothing(tmp_path: Path) -> None:
    target, settings = make_target(tmp_path, "llama"), Settings(state_dir=tmp_path / "state")
    with Reference(target, settings) as reference:
        found = reference.states(SEQUENCES)
    assert reference.how == "whole, float32 on cpu"
    assert_right(target, found)
    assert list(settings.scratch_dir.iterdir()) == []
    assert recorded(settings.run_dir) == []


def test_a_refusal_comes_out_of_the_process_as_one(tmp_path: Path) -> None:
    target, settings = make_target(tmp_path, "llama"), Settings(state_dir=tmp_path / "state")
    repack(target, "exotic")
    with (
        Reference(target, settings, "streamed") as reference,
        pytest.raises(ReferenceUnavailable, match=r"no reference for target llama: .* quantised \(exotic\) in a way"),
    ):
        reference.states(SEQUENCES)


def repack(target: Target, method: str) -> dict[str, torch.Tensor]:
    """Quantise one weight in place; returns the plain tensors that it now stands for."""
    path = target.path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.gate_proj.weight"
    weight = tensors.pop(name)
    stem = name.removesuffix(".weight")
    plain = dict(tensors)
    if method == "compressed-tensors":
        scale = weight.reshape(48, 2, 16).abs().amax(-1) / 7
        values = (weight / scale.repeat_interleave(16, 1)).round().clamp(-8, 7).to(torch.int32)
        plain[name] = (values * scale.repeat_interleave(16, 1)).to(torch.bfloat16).float()
        packed = sum((values[:, place::8] + 8) << (4 * place) for place in range(8))
        tensors |= {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": scale,
                    f"{stem}.weight_shape": torch.tensor([48, 32])}  # fmt: skip
        quantization: dict[str, Any] = {
            "format": "pack-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 4}}},
        }
    else:
        tensors[name] = torch.ones(48, 32, dtype=torch.int8)
        quantization = {}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((target.path / "config.json").read_text())
    config["quantization_config"] = quantization | {"quant_method": method}
    (target.path / "config.json").write_text(json.dumps(config))
    return plain


def test_int4_weights_are_read_as_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    quantised, plain = make_target(tmp_path / "q", "llama"), make_target(tmp_path / "p", "llama")
    save_file(repack(quantised, "compressed-tensors"), plain.path / "model.safetensors", metadata={"format": "pt"})
    _, found = ask(quantised, "streamed")
    _, expected = ask(plain, "whole")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-4, atol=1e-5)


def test_a_family_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path, "llama")
    config = json.loads((target.path / "config.json").read_text())
    (target.path / "config.json").write_text(json.dumps({**config, "model_type": "nobody_knows"}))
    said, _ = ask(target, "auto")
    assert said["refused"].startswith("transformers has no code for its family 'nobody_knows'")


def test_a_target_that_does_not_fit_is_refused_with_what_is_needed_and_free(tmp_path: Path) -> None:
    target = make_target(tmp_path, "llama")
    header = json.dumps({"model.layers.0.x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 0]}}).encode()
    (target.path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    said, _ = ask(target, "auto")
    found = r"it needs 4398\.0 GB whole and 4398\.0 GB streamed and 0\.0 GB for its states, and \d+\.\d GB of memory"
    assert re.match(found, said["refused"])


def test_long_and_many_sequences_count_as_memory(tmp_path: Path) -> None:
    target = make_target(tmp_path, "llama")
    with pytest.raises(Refused, match=r"and 4000\.0 GB for its states, and \d+\.\d GB of memory are free"):
        choose(target.path, "auto", "cpu", kept=4000 * 10**9)
    shape = target.shape
    padded, a_token = 2 * 7, 4 * (2 * (shape.layers + 1) * shape.hidden_size + shape.vocab_size)
    assert kept_bytes(shape, [[1] * 7, [1]]) == padded * a_token
