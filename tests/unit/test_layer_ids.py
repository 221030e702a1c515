"""Taps to engine ids and back; what the table does not cover is refused by name."""

import pytest

from infra.engines.layer_ids import RULES, engine_layer_ids, find_rule, taps_of
from infra.errors import EngineError


def test_vllm_numbers_llama_layers_like_taps_and_adds_the_final_state() -> None:
    assert engine_layer_ids("vllm", "0.32.0", "llama", (2, 15, 27), 30) == (2, 15, 27, 30)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.engine}-{rule.families[0]}")
def test_ids_turn_back_into_taps_for_every_row(rule) -> None:  # type: ignore[no-untyped-def]
    version = f"{rule.since[0]}.{rule.since[1]}.0"
    taps = (rule.lowest_tap, 5, 9)
    for family in rule.families:
        ids = engine_layer_ids(rule.engine, version, family, taps, 10)
        assert taps_of(rule.engine, version, family, ids)[:3] == taps
        assert len(ids) == (4 if rule.final == "id" else 3)
    assert rule.source


def test_deepseek_on_vllm_has_no_tap_zero() -> None:
    assert engine_layer_ids("vllm", "0.33.0", "deepseek_v3", (1, 30, 58), 61) == (1, 30, 58, 61)
    with pytest.raises(EngineError, match="tap 0 "):
        engine_layer_ids("vllm", "0.33.0", "deepseek_v3", (0, 30, 58), 61)


@pytest.mark.parametrize("taps", [(), (3, 2), (2, 2), (2, 30), (-1, 2)])
def test_taps_that_cannot_be_captured_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="cannot be captured"):
        engine_layer_ids("vllm", "0.32.0", "llama", taps, 30)


def test_what_the_table_does_not_cover_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"'mamba'.*llama"):
        find_rule("vllm", "0.32.0", "mamba")
    with pytest.raises(EngineError, match=r"0.5.0.*0.24 to 0.33"):
        find_rule("vllm", "0.5.0", "llama")
    with pytest.raises(EngineError, match="'nothing'"):
        find_rule("nothing", "0.32.0", "llama")
    with pytest.raises(EngineError, match="'main'"):
        find_rule("vllm", "main", "llama")
