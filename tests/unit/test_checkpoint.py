"""Checkpoints after kills, drafts that are not what was asked for, published and perturbed folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from standin.perturbed import perturbed

from infra.drafter.checkpoint import (
    REPLACED,
    SAVING,
    Checkpoint,
    DraftShape,
    best,
    publishable,
    settle,
    verify_draft,
)
from infra.errors import TrainingError

SHAPE = DraftShape(taps=(1, 2, 3), layers=1, hidden_size=4, vocab_size=16, draft_vocab_size=8)
LOCAL = "/srv/models/tiny"


def config(**changes: Any) -> dict[str, Any]:
    base = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 8,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": False,
        "dtype": "float32",
        "speculators_config": {
            "algorithm": "eagle3",
            "verifier": {"name_or_path": LOCAL, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1, "layer_types": ["full_attention"]},
    }
    return {**base, **changes}


def weights() -> dict[str, torch.Tensor]:
    mask = torch.zeros(16, dtype=torch.bool)
    mask[:8] = True
    return {
        "fc.weight": torch.arange(48, dtype=torch.float32).reshape(4, 12),
        "lm_head.weight": torch.ones(8, 4),
        "d2t": torch.zeros(8, dtype=torch.long),
        "t2d": mask,
    }


def draft(folder: Path, step: int | None = None, local_step: int = 0, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    save_file(weights(), folder / "model.safetensors")
    if step is not None:
        (folder / "optimizer_state_dict.pt").write_bytes(b"state")
        state = {"epoch": int(folder.name), "global_step": step, "local_step": local_step}
        (folder / "training_state.json").write_text(json.dumps(state))
    return folder


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert settle(tmp_path / "none") == []


def test_complete_checkpoints_are_kept_and_the_rest_goes(tmp_path: Path) -> None:
    draft(tmp_path / "0", step=10)
    draft(tmp_path / "1", step=15, local_step=5)
    draft(tmp_path / "2")  # killed before its state was written
    torn = draft(tmp_path / "3", step=30)
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:40])
    for name, text in (("5", "[]"), ("6", '{"global_step": 1, "local_step"'), ("7", "")):
        (draft(tmp_path / name, step=40) / "training_state.json").write_text(text)
    draft(tmp_path / "interrupted")
    draft(tmp_path / SAVING / "4")
    (tmp_path / "checkpoint_best").symlink_to("0")

    assert settle(tmp_path) == [Checkpoint(tmp_path / "0", 0, 10, True), Checkpoint(tmp_path / "1", 1, 15, False)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "checkpoint_best"]


def test_a_checkpoint_under_replacement_comes_back(tmp_path: Path) -> None:
    draft(tmp_path / "0", step=5, local_step=5).rename(tmp_path / f"{REPLACED}0")
    draft(tmp_path / SAVING / "0", step=10)
    assert [item.step for item in settle(tmp_path)] == [5]


def test_a_replaced_checkpoint_goes_when_its_successor_is_in_place(tmp_path: Path) -> None:
    draft(tmp_path / "0", step=5, local_step=5).rename(tmp_path / f"{REPLACED}0")
    draft(tmp_path / "0", step=10)
    assert [item.step for item in settle(tmp_path)] == [10]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_the_best_epoch_is_the_one_with_the_most_accepted(tmp_path: Path) -> None:
    found = [Checkpoint(tmp_path / str(epoch), epoch, 10 * epoch + 10, ends_epoch=epoch < 3) for epoch in range(4)]
    assert best(found, {0: 0.5, 1: 0.7, 2: 0.6, 3: 0.9}).epoch == 1
    assert best(found, {0: 0.5, 1: 0.7, 2: 0.7}).epoch == 2
    assert best(found, {}).epoch == 2


def test_the_draft_that_was_asked_for_verifies(tmp_path: Path) -> None:
    verify_draft(draft(tmp_path / "d"), SHAPE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draft_vocab_size": 16}, "draft_vocab_size 16.*Expected: 8"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, "taps .*\\(2, 3, 4\\)"),
        ({"norm_before_residual": True}, "norm_before_residual True"),
        ({"norm_before_fc": True}, "norm_before_fc True"),
        (
            {
                "transformer_layer_config": {
                    "model_type": "llama",
                    "num_hidden_layers": 1,
                    "layer_types": ["sliding_attention"],
                }
            },
            "layer_types .*sliding_attention",
        ),
        ({"speculators_model_type": "dflash"}, "no EAGLE-3 draft"),
    ],
)
def test_another_draft_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        verify_draft(draft(tmp_path / "d", **changes), SHAPE)


@pytest.mark.parametrize("lost", ["d2t", "t2d", "fc.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, lost: str) -> None:
    folder = draft(tmp_path / "d")
    save_file({name: tensor for name, tensor in weights().items() if name != lost}, folder / "model.safetensors")
    with pytest.raises(TrainingError, match=f"has {lost} None"):
        verify_draft(folder, SHAPE)


def test_nan_weights_are_refused(tmp_path: Path) -> None:
    folder = draft(tmp_path / "d")
    bad = weights()
    bad["lm_head.weight"][3, 1] = torch.nan
    save_file(bad, folder / "model.safetensors")
    with pytest.raises(TrainingError, match=r"lm_head.weight .* NaN"):
        verify_draft(folder, SHAPE)


def test_the_published_folder_has_bf16_weights_and_no_local_path(tmp_path: Path) -> None:
    out = publishable(draft(tmp_path / "0", step=10), tmp_path / "out", "org/tiny")
    written = json.loads((out / "config.json").read_text())
    assert LOCAL not in (out / "config.json").read_text()
    assert written["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"
    assert written["dtype"] == "bfloat16"
    assert written["transformer_layer_config"]["num_aux_hidden_states"] == 3
    loaded = load_file(out / "model.safetensors")
    assert loaded["fc.weight"].dtype == torch.bfloat16
    assert loaded["d2t"].dtype == torch.int64
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    verify_draft(out, SHAPE)
    assert publishable(tmp_path / "0", out, "org/other") == out
    assert "org/other" in (out / "config.json").read_text()


def test_a_local_path_in_an_unknown_field_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="names the local path"):
        publishable(draft(tmp_path / "0", made_from=f"{LOCAL}/config.json"), tmp_path / "out", "org/tiny")
    assert not (tmp_path / "out").exists()


def test_perturbed_drafts_differ_in_one_thing(tmp_path: Path) -> None:
    good = publishable(draft(tmp_path / "0"), tmp_path / "good", "org/tiny")
    permuted = perturbed(good, tmp_path / "permuted", "layers_permuted")
    before, after = load_file(good / "model.safetensors"), load_file(permuted / "model.safetensors")
    assert torch.equal(after["fc.weight"], before["fc.weight"][:, [4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3]])
    assert all(torch.equal(after[name], before[name]) for name in before if name != "fc.weight")
    assert (permuted / "config.json").read_text() == (good / "config.json").read_text()

    shifted = perturbed(good, tmp_path / "shifted", "taps_shifted")
    assert json.loads((shifted / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert (shifted / "model.safetensors").read_bytes() == (good / "model.safetensors").read_bytes()
