"""How answers are sampled is what the round says, never what the target's own files recommend."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from standin.tiny import NAME, random_llama, small_round, write_prompts

from infra.config.load import build_round
from infra.config.round import EvaluateConfig, GenerateConfig
from infra.config.sampling import sampling_words
from infra.config.settings import Settings
from infra.engines.client.dialect import Sampling
from infra.errors import ConfigError
from infra.round.context import RoundContext
from infra.round.sampling import sampling_notes
from infra.targets.target import recommended_sampling

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 2}


def round_of(tmp_path: Path, overrides: dict[str, Any]) -> RoundContext:
    settings = Settings(state_dir=tmp_path / "state", cache_dir=tmp_path / "cache", models_dir=tmp_path / "models")
    folder = settings.models_dir / NAME
    if not folder.is_dir():
        import torch

        random_llama(folder, 320, torch.float32)
        (folder / "generation_config.json").write_text(json.dumps(QWEN))
    return RoundContext(build_round(small_round(*write_prompts(tmp_path)), overrides), settings)


def test_what_the_target_recommends_is_told_and_not_used(tmp_path: Path) -> None:
    named = "temperature 0.7, top_p 0.8, top_k 20, repetition_penalty 1.05"
    for section, note in zip(("generate", "evaluate"), sampling_notes(round_of(tmp_path, {})), strict=True):
        assert f"recommends {named}, which {section} does not use (greedy)" in note
    assert Sampling.of(round_of(tmp_path, {}).config.generate, 8) == Sampling(8)


def test_what_the_round_takes_over_is_no_note(tmp_path: Path) -> None:
    values: dict[str, Any] = {name: value for name, value in QWEN.items() if name not in ("do_sample", "eos_token_id")}
    overrides = {f"{section}.{name}": value for section in ("generate", "evaluate") for name, value in values.items()}
    context = round_of(tmp_path, overrides)
    assert sampling_notes(context) == []
    assert Sampling.of(context.config.evaluate, 8, seed=3) == Sampling(8, seed=3, **values)
    assert "top_k 20, repetition_penalty 1.05" in sampling_words(context.config.generate)


def test_neutral_values_and_none_are_no_recommendation(tmp_path: Path) -> None:
    assert recommended_sampling(tmp_path) == {}
    said = {"temperature": 1.0, "top_p": None, "repetition_penalty": 1, "top_k": True, "min_p": "0.1"}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert recommended_sampling(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        recommended_sampling(tmp_path)


@pytest.mark.parametrize("kind", [GenerateConfig, EvaluateConfig])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"temperature": 1.0, "top_k": -1}, "top_k"),
        ({"min_p": 0.1}, "temperature above 0"),
        ({"top_k": 5}, "temperature above 0"),
    ],
)
def test_values_that_mean_nothing_are_refused(kind: type, values: dict[str, float], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        kind(**values)


def test_min_p_is_for_answers_and_not_for_what_is_measured_with_a_draft() -> None:
    """vLLM 0.32 refuses it (SamplingParams._validate_spec_decode); SGLang's check of drafts does not know it."""
    assert GenerateConfig(min_p=0.1, temperature=1.0).min_p == 0.1
    with pytest.raises(ValidationError, match="leave min_p out: .*vLLM refuses"):
        EvaluateConfig(min_p=0.1, temperature=1.0)
