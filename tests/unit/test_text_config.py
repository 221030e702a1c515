"""A target's shape, however its config.json spells it, and with what it leaves to its library's defaults."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from infra.config.round import TargetShape
from infra.errors import ConfigError
from infra.targets.target import read_shape
from infra.targets.text import text_fields

CASES = Path(__file__).resolve().parents[1] / "cases"
FAMILIES = {
    "deepseek-v3": "deepseek_v3", "glm4-moe": "glm4_moe", "gpt-oss": "gpt_oss", "gpt2-names": "gpt2",
    "internvl-llm-config": "qwen2", "kimi-k2": "kimi_k2", "kimi-k25": "kimi_k2", "llama31-rope": "llama",
    "minimax-m2": "minimax_m2", "mistral3": "mistral", "qwen2.5-vl-flat": "qwen2_5_vl", "qwen2": "qwen2",
    "qwen3-yarn": "qwen3", "text-config-null": "llama",
}  # fmt: skip


def shape_of(folder: Path, config: Any, trust: bool = False) -> TargetShape:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return read_shape(folder, trust)


def test_every_case_has_its_family_here() -> None:
    assert {path.name.removesuffix(".config.json") for path in (CASES / "configs").iterdir()} == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_case_is_opened(name: str, tmp_path: Path) -> None:
    shape = shape_of(tmp_path, (CASES / "configs" / f"{name}.config.json").read_text())
    assert shape == TargetShape(layers=4, hidden_size=64, vocab_size=256, weight_bytes=0, family=FAMILIES[name])


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}, (32, 4096, 32000, "mistral")),
        ({"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 64}}, (32, 64, 32000, "llama")),
        ({"model_type": "own_chat", "llm_config": {"model_type": "qwen2"}}, (32, 4096, 151936, "qwen2")),
        ({"model_type": "llama", "num_hidden_layers": 3, "text_config": {}}, (3, 4096, 32000, "llama")),
        ({"model_type": "gpt_neox", "hidden_size": 8, "num_attention_heads": 2}, (44, 8, 50432, "gpt_neox")),
        ({"model_type": "qwen2_5_omni", "thinker_config": {"text_config": {"model_type": "qwen2", "hidden_size": 64}}},
         (28, 64, 152064, "qwen2")),
    ],
)  # fmt: skip
def test_what_a_config_leaves_out_is_what_its_class_says(
    config: dict[str, Any], found: tuple[int, int, int, str], tmp_path: Path
) -> None:
    shape = shape_of(tmp_path, config)
    assert (shape.layers, shape.hidden_size, shape.vocab_size, shape.family) == found


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "own", "hidden_size": 8},
            "no 'num_hidden_layers'.*no config class for .*'own'",
        ),
        ({"hidden_size": 8}, "a config without model_type"),
        ({"model_type": "t5"}, "no 'num_hidden_layers'.*decoder-only"),
        (
            {"model_type": "llama", "hidden_size": "wide", "num_hidden_layers": 1, "vocab_size": 2},
            "hidden_size: .*integer",
        ),
        ({"model_type": "gpt2", "n_layer": "many"}, "transformers cannot open .*n_layer"),
        ({"model_type": 5}, "no 'num_hidden_layers'"),
        ({"model_type": "llama", "text_config": "own"}, "text_config that is no JSON object: 'own'"),
        ({"model_type": "own", "llm_config": {"text_config": [1]}}, "text_config that is no JSON object"),
        ("[]", "holds list"),
    ],
)
def test_what_is_no_language_model_is_a_sentence(config: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        shape_of(tmp_path, config)
    assert "\n" not in str(caught.value)


def test_a_config_that_comes_as_code_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    shutil.copytree(CASES / "config-with-code", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert shape_of(tmp_path, config).family == "kimi_k2"
    del config["vocab_size"]
    with pytest.raises(ConfigError, match="trust_remote_code"):
        shape_of(tmp_path, config)
    assert shape_of(tmp_path, config, trust=True).vocab_size == 129280


def test_other_fields_have_their_defaults_too(tmp_path: Path) -> None:
    shape_of(tmp_path, {"model_type": "mistral3", "text_config": {"model_type": "mistral"}})
    assert text_fields(tmp_path, ("rms_norm_eps",)) == {"rms_norm_eps": 1e-6}
