"""The draft's layouts by engine: SGLang's ids for the taps, and rounds that ask SGLang for what it cannot do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from standin import sglang_reader
from standin.speculators_draft import draft_config, write_draft

from infra.config.load import build_round, load_round, round_file
from infra.config.round import RoundConfig, TargetShape
from infra.config.settings import Settings
from infra.engines.sglang.draft import inexpressible, write_sglang
from infra.engines.sglang.layer_ids import NUMBERING
from infra.errors import EngineError
from infra.machine.gpus.readings import GpuReport
from infra.round.context import RoundContext
from infra.round.draft_layouts import layout_note
from infra.round.preflight import faults
from infra.steps.plan import make_plan

LLAMA = TargetShape(layers=30, hidden_size=576, vocab_size=49152, weight_bytes=1, family="llama")
KIMI = TargetShape(layers=61, hidden_size=7168, vocab_size=163840, weight_bytes=1, family="deepseek_v3")
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
NO_GPU = GpuReport(False, "no NVIDIA driver", "", ())


def smoke(name: str = "smoke-sglang", **overrides: Any) -> RoundConfig:
    raw = load_round(round_file(name)).model_dump(mode="json")
    return build_round(raw, {key.replace("__", "."): value for key, value in overrides.items()})


def noted(taps: tuple[int, ...], version: str | None, draft: dict[str, Any]) -> str:
    assert layout_note("vllm", taps, LLAMA, None, draft) is None
    note = layout_note("sglang", taps, LLAMA, version, draft)
    assert note is not None
    return note


@pytest.mark.parametrize(("shape", "taps"), [(LLAMA, (2, 15, 27)), (KIMI, (3, 31, 59)), (KIMI, (2, 30, 58))])
@pytest.mark.parametrize("version", ["0.5.14", "0.5.17", "0.5.23", None])
def test_the_published_ids_are_read_back_as_the_taps(
    tmp_path: Path, shape: TargetShape, taps: tuple[int, ...], version: str | None
) -> None:
    numbers = NUMBERING.numbers(taps, shape, version)
    folder = write_draft(tmp_path / "draft", draft_config(eagle_aux_hidden_state_layer_ids=list(taps)))
    read = sglang_reader.read(write_sglang(folder, tmp_path / "out", numbers))

    assert read.ids is not None
    said = json.loads((tmp_path / "out" / "eagle3.json").read_text())["layer_ids_hold_for"]
    for reading in (numbers.version, said["since"], said["until"]):
        assert NUMBERING.find_rule(reading, shape.family).taps(read.ids, shape.layers) == taps
    assert version in (numbers.version, None)


def test_a_version_or_family_that_nobody_read_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"sglang 0\.5\.9"):
        NUMBERING.numbers((2, 15, 27), LLAMA, "0.5.9")
    with pytest.raises(EngineError, match="'mamba' target is not known"):
        NUMBERING.numbers((2, 15, 27), LLAMA.model_copy(update={"family": "mamba"}), None)


def test_what_is_not_known_of_sglangs_layout_is_a_note() -> None:
    assert "will not be published in SGLang's layout" in noted((0, 15, 27), None, {})
    assert "norm_before_fc" in noted((2, 15, 27), "0.5.16", {"norm_before_fc": True})


@pytest.mark.parametrize(
    ("fields", "rope", "range_"),
    [
        ({}, {}, "0.5.14 to 0.5.23"),
        ({"norm_before_fc": True}, {}, "0.5.17 to 0.5.23"),
        ({}, YARN, "0.5.14 to 0.5.23"),
        ({}, YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "0.5.16 to 0.5.23"),
        ({"norm_before_fc": True}, YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "0.5.17 to 0.5.23"),
        ({}, YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}, "0.5.14 to 0.5.23"),
        ({}, YARN | {"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "0.5.14 to 0.5.23"),
    ],
)
def test_a_layout_holds_for_the_versions_that_read_all_of_it(
    tmp_path: Path, fields: dict[str, Any], rope: dict[str, Any], range_: str
) -> None:
    config = draft_config(**fields)
    config["transformer_layer_config"]["rope_parameters"] |= rope
    out = write_sglang(
        write_draft(tmp_path / "draft", config), tmp_path / "out", NUMBERING.numbers((2, 15, 27), LLAMA, None)
    )
    said = json.loads((out / "eagle3.json").read_text())["layer_ids_hold_for"]
    assert f"{said['since']} to {said['until']}" == range_
    assert f"(so numbered: {range_})" in noted((2, 15, 27), None, config)


@pytest.mark.parametrize(("version", "serves"), [("0.5.15", False), ("0.5.16", True)])
def test_sglang_until_0_5_15_reads_deepseeks_yarn_otherwise(version: str, serves: bool) -> None:
    config = draft_config()
    config["transformer_layer_config"]["rope_parameters"] |= YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    assert (inexpressible(config, version) == "") is serves


@pytest.mark.parametrize(
    "rope", [YARN | {"attention_factor": 1.0}, YARN | {"factor": None}, {"rope_type": "longrope", "factor": 4.0}]
)
def test_rotary_settings_that_sglang_reads_otherwise_are_refused_in_every_version(rope: dict[str, Any]) -> None:
    config = draft_config()
    config["transformer_layer_config"]["rope_parameters"] |= rope
    assert all(inexpressible(config, version) for version in ("0.5.14", "0.5.23"))


def test_the_plan_of_round2_says_its_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("EAGLE3_CACHE_DIR", str(tmp_path))
    notes = make_plan(RoundContext(smoke("round2", prompts__count=20), Settings())).notes
    assert any("taps 3, 31, 59 are layer ids 3, 31, 59 of sglang 0.5.23" in note for note in notes)


def test_preflight_names_the_command_that_builds_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("EAGLE3_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("EAGLE3_ENV_SGLANG_CPU", raising=False)
    said = " ".join(faults(smoke(), Settings(), NO_GPU))
    assert "eagle3 engines install sglang-cpu" in said


def test_only_engines_that_are_used_need_gpus(tmp_path: Path) -> None:
    """smoke-sglang describes both engines; one that does neither extract nor serve is of no account."""
    box: dict[str, Any] = {
        "engines__vllm": {"device": "cuda", "tensor_parallel": 4, "max_model_len": 2048},
        "serve_with": "sglang",
    }
    spare = smoke(**box, extract__engine="sglang", train__devices=2)
    assert spare.used_engines == ("sglang",)
    settings = Settings(state_dir=tmp_path)
    assert not any("GPUs" in text for text in faults(spare, settings, NO_GPU, serves=False))
    said = " ".join(faults(smoke(**box, extract__engine="vllm", train__devices=2), settings, NO_GPU, serves=False))
    assert "vllm needs 4 GPUs" in said
    assert "training wants 2 GPUs" in said


@pytest.mark.parametrize("built", [False, True])
def test_a_trainer_without_cuda_is_named_before_anything_is_made(
    built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    box = smoke(serve_with="sglang", engines__sglang={"device": "cuda", "max_model_len": 2048})
    for config, lacks in ((box, not built), (smoke(), False)):
        said = " ".join(faults(config, Settings(state_dir=tmp_path), NO_GPU))
        assert ("export EAGLE3_FLOWS=flows-cuda" in said) == lacks
