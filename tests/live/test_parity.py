"""The parity gate between real engines on the CPU: what agrees passes, what is planted in a launch is named."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from infra.config.load import load_round, round_file
from infra.config.settings import Settings
from infra.environments.building import environment_python
from infra.errors import EnvironmentBuildError, GateError
from infra.gates.agreement import Side
from infra.gates.parity import alone, judge, parity_gate, prompt_sequences, take
from infra.round.context import Round
from infra.round.serving import Serving

pytestmark = pytest.mark.timeout(1200)
SAMPLES = 6


def states_of(engine: str, settings: Settings, changes: Mapping[str, Any]) -> tuple[Round, Side]:
    """What an engine makes of the smoke round's prompts, launched with some of the round changed."""
    config = load_round(round_file("smoke-sglang"), changes)
    round_ = Round(alone(config, config.extract.engine if engine == "sglang" else config.serve_with, SAMPLES), settings)
    with Serving(round_, "extract") as serving:
        return round_, take(serving, prompt_sequences(round_), print)


@pytest.fixture(scope="module")
def plain(settings: Settings) -> tuple[Round, Side]:
    """vLLM in float32, as the smoke round runs it."""
    return states_of("vllm", settings, {})


def ids_in_launch(ids: list[int]) -> dict[str, Any]:
    """A rung whose flags make vLLM capture these layers, whatever was asked for: the last flag wins."""
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    flags = ["--enforce-eager", "--speculative-config", json.dumps(speculation)]
    return {"engines.vllm.ladder": [{"name": "planted", "flags": flags}]}


def test_the_same_engine_in_bfloat16_is_the_same_engine(plain: tuple[Round, Side], settings: Settings) -> None:
    round_, one = plain
    _, other = states_of("vllm", settings, {"engines.vllm.dtype": "bfloat16"})
    found = judge(round_, one, other, print)
    print(found.model_dump_json(indent=1))
    parity_gate(found)
    assert found.reference
    for tap in found.taps:
        assert tap.neighbour is not None
        assert tap.median < 0.5 * tap.bound


def test_layers_that_are_off_by_one_are_named(plain: tuple[Round, Side], settings: Settings) -> None:
    round_, one = plain
    _, other = states_of("vllm", settings, ids_in_launch([3, 16, 28, 30]))
    with pytest.raises(GateError, match=r"tap 2 differs by .*gives tap 3 where 2 was asked: off by \+1; tap 15 .*"
                       r"gives tap 16 where 15 .*gives tap 28 where 27 .*layer_ids\.py"):  # fmt: skip
        parity_gate(judge(round_, one, other, print))


def test_vllm_and_sglang_compute_the_same(plain: tuple[Round, Side], settings: Settings) -> None:
    try:
        environment_python("sglang-cpu", settings.cache_dir)
    except EnvironmentBuildError as error:
        pytest.skip(str(error))
    round_, one = plain
    _, other = states_of("sglang", settings, {})
    found = judge(round_, one, other, print)
    print(found.model_dump_json(indent=1))
    parity_gate(found)
    assert found.conversations == SAMPLES
    for tap in found.taps:
        assert tap.median < 0.5 * tap.bound
