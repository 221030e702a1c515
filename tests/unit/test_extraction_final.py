"""The last slot of states from an engine that gives it after the norm, and what an engine says it captured."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infra.config.round import TargetShape
from infra.engines.client.extraction import ExtractionFault, Extractor
from infra.errors import ConfigError
from infra.targets.final_norm import FinalNorm, read_final_norm
from infra.targets.target import Target

HIDDEN = 8
GENERATOR = torch.Generator().manual_seed(1)


def norm(**changed: Any) -> FinalNorm:
    weight = torch.rand(HIDDEN, generator=GENERATOR) * 3 - 1.5
    return FinalNorm(**{"weight": weight, "eps": 1e-5, **changed})


class Engine:
    """Answers each request with a file of states, as an engine's client would."""

    def __init__(self, staging: Path, hidden: torch.Tensor, layer_ids: tuple[int, ...] | None = None) -> None:
        self.staging, self.hidden, self.layer_ids = staging, hidden, layer_ids
        self.asked: list[list[int]] = []

    def extract(self, token_ids: Any) -> Any:
        self.asked.append(list(token_ids))
        file = self.staging / f"{len(self.asked)}.safetensors"
        rows = self.hidden[: len(token_ids)].contiguous()
        save_file({"hidden_states": rows, "token_ids": torch.tensor(list(token_ids))}, file)
        Path(f"{file}.lock").touch()
        return SimpleNamespace(path=str(file), next_token=7, layer_ids=self.layer_ids)


def extractor(engine: Any, **options: Any) -> Extractor:
    return Extractor(engine, engine.staging, (1, 2), HIDDEN, **options)


def test_a_final_state_after_the_norm_becomes_one_that_the_norm_turns_into_it(tmp_path: Path) -> None:
    final_norm = norm()
    before = torch.randn(16, 3, HIDDEN, generator=GENERATOR) * 20
    given = before.clone()
    given[:, -1] = final_norm(before[:, -1])
    states = extractor(Engine(tmp_path, given), final_norm=final_norm).extract(range(16)).hidden_states
    assert torch.equal(states[:, :2], before[:, :2].bfloat16())
    assert not torch.allclose(states[:, 2].float(), before[:, 2], rtol=0.1)
    assert torch.allclose(final_norm(states[:, 2]), final_norm(before[:, 2]), rtol=0.01, atol=1e-4)
    assert torch.allclose(states[:, 2].float().pow(2).mean(-1), torch.ones(16), rtol=0.02)


def test_bfloat16_states_after_the_norm_are_divided_in_float32(tmp_path: Path) -> None:
    final_norm = norm()
    given = torch.randn(4, 3, HIDDEN, generator=GENERATOR).bfloat16()
    states = extractor(Engine(tmp_path, given), final_norm=final_norm).extract(range(4)).hidden_states
    assert torch.equal(states[:, 2], (given[:, 2].float() / final_norm.weight).bfloat16())


def test_without_a_norm_the_final_state_stays_as_the_engine_gave_it(tmp_path: Path) -> None:
    given = torch.randn(4, 3, HIDDEN, generator=GENERATOR).bfloat16()
    assert torch.equal(extractor(Engine(tmp_path, given)).extract(range(4)).hidden_states, given)


def test_a_norm_with_a_zero_weight_cannot_be_undone(tmp_path: Path) -> None:
    weight = torch.ones(HIDDEN)
    weight[3] = 0
    with pytest.raises(ConfigError, match=r"1 weights .* are zero.*the final state before the norm"):
        extractor(Engine(tmp_path, torch.ones(4, 3, HIDDEN)), final_norm=norm(weight=weight)).extract(range(4))
    assert list(tmp_path.iterdir()) == []


def test_layer_ids_other_than_the_rounds_are_refused_before_the_file_is_read(tmp_path: Path) -> None:
    engine = Engine(tmp_path, torch.ones(8, 3, HIDDEN), layer_ids=(1, 14, 26))
    assert extractor(engine, layer_ids=(1, 14, 26)).extract(range(4)).next_token == 7
    assert extractor(engine).extract(range(4)).next_token == 7
    with pytest.raises(ExtractionFault, match=r"\[1, 14, 26\].*\[2, 15, 27\]"):
        extractor(engine, layer_ids=(2, 15, 27)).extract(range(4))
    assert list(tmp_path.iterdir()) == []


def test_proving_asks_twice_for_the_same_tokens_so_that_a_prefix_cache_shows(tmp_path: Path) -> None:
    engine = Engine(tmp_path, torch.ones(8, 3, HIDDEN))
    extractor(engine).prove()
    assert engine.asked[0] == engine.asked[1]
    with pytest.raises(ExtractionFault, match=r"\[7, 3, 8\]"):
        extractor(Engine(tmp_path, torch.ones(7, 3, HIDDEN))).prove()


def target(folder: Path, family: str, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Target:
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config}))
    save_file(weights, folder / "model.safetensors")
    shape = TargetShape(layers=1, hidden_size=HIDDEN, vocab_size=9, weight_bytes=1, family=family)
    return Target(name="t", path=folder, shape=shape, revision="0" * 16)


def test_the_norm_is_read_with_the_targets_own_epsilon(tmp_path: Path) -> None:
    weights = {"language_model.model.norm.weight": torch.full((HIDDEN,), 2.0, dtype=torch.bfloat16)}
    found = read_final_norm(target(tmp_path, "kimi_k2", {"text_config": {"rms_norm_eps": 1e-5}}, weights))
    assert found.eps == 1e-5
    assert found.weight.tolist() == [2.0] * HIDDEN
    tiny = torch.full((HIDDEN,), 1e-4)
    assert torch.allclose(found(tiny), torch.full((HIDDEN,), 2e-4 / (1e-8 + 1e-5) ** 0.5))


def test_an_epsilon_that_is_not_written_is_the_librarys(tmp_path: Path) -> None:
    weights = {"model.norm.weight": torch.ones(HIDDEN)}
    assert read_final_norm(target(tmp_path, "llama", {"model_type": "llama"}, weights)).eps == 1e-6


@pytest.mark.parametrize(
    ("family", "config"), [("gemma3_text", {"rms_norm_eps": 1e-6}), ("gpt2", {"layer_norm_epsilon": 1e-5})]
)
def test_other_norms_are_refused_by_name(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"\({family}\) is not known to be a plain RMSNorm"):
        read_final_norm(target(tmp_path, family, config, {"model.norm.weight": torch.ones(HIDDEN)}))
