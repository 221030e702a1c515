"""The parity gate between real engines on the CPU: what agrees passes, what is planted in a launch is named."""

import pytest
from standin.real_engines import SAMPLES, Planted, side

from infra.errors import GateError
from infra.gates.agreement import Side
from infra.gates.parity import judge, parity_gate
from infra.round.serving import Serving

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def plain(vllm: Serving) -> Side:
    """vLLM in float32, as the smoke round runs it."""
    return side(vllm)


def test_the_same_engine_in_bfloat16_is_the_same_engine(vllm: Serving, plain: Side, planted: Planted) -> None:
    found = judge(vllm.context, plain, side(planted.plant("")))
    print(found.model_dump_json(indent=1))
    parity_gate(found)
    assert found.reference
    for tap in found.taps:
        assert tap.neighbour is not None
        assert tap.median < 0.5 * tap.bound


def test_layers_that_are_off_by_one_are_named(vllm: Serving, plain: Side, shifted: Serving) -> None:
    with pytest.raises(GateError, match=r"tap 2 differs by .*gives tap 3 where 2 was asked: off by \+1; tap 15 .*"
                       r"gives tap 16 where 15 .*gives tap 28 where 27 .*layer_ids\.py"):  # fmt: skip
        parity_gate(judge(vllm.context, plain, side(shifted)))


def test_vllm_and_sglang_compute_the_same(vllm: Serving, plain: Side, sglang: Serving) -> None:
    found = judge(vllm.context, plain, side(sglang))
    print(found.model_dump_json(indent=1))
    parity_gate(found)
    assert found.conversations == SAMPLES
    for tap in found.taps:
        assert tap.median < 0.5 * tap.bound
