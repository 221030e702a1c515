"""The convention gate with the real vLLM on CPU: the right launch passes, planted faults stop with their sentences.

Faults are in the server's launch arguments or in a connector of the test's own, never in the comparison.
"""

import json
from dataclasses import dataclass

import pytest
import torch
from standin.real_engines import Planted

from infra.engines.reference.process import Reference
from infra.errors import GateError
from infra.gates.convention import Truth, capture, compute_truth, convention_gate, measure
from infra.report.layers import layers_table
from infra.results import Convention
from infra.round.context import RoundContext
from infra.round.serving import Serving

pytestmark = pytest.mark.timeout(900)


@dataclass
class Bench:
    """Prompts of the target, and the truth about them."""

    tokens: list[list[int]]
    truth: Truth

    def measure(self, serving: Serving) -> Convention:
        """What the gate finds out about a server."""
        return measure(serving.context, capture(serving, self.tokens), self.truth)


@pytest.fixture(scope="module")
def context(vllm: Serving) -> RoundContext:
    return vllm.context


@pytest.fixture(scope="module")
def bench(context: RoundContext) -> Bench:
    tokens = [context.chat.render(prompt.messages)[:96] for prompt in context.prompts[:6]]
    truth = compute_truth(context, tokens)
    assert truth.how == "whole, float32 on cpu", truth.why
    return Bench(tokens, truth)


def test_streamed_states_equal_whole_ones(bench: Bench, context: RoundContext) -> None:
    with Reference(context.target, context.settings, "streamed") as reference:
        streamed = reference.states(bench.tokens)
    assert reference.how == "streamed, float32 on cpu"
    for one, other in zip(streamed, bench.truth.states, strict=True):
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-3, atol=1e-3)
        assert one.next_tokens.tolist() == other.next_tokens.tolist()


def test_the_layers_that_were_asked_for_pass(bench: Bench, vllm: Serving) -> None:
    found = bench.measure(vllm)
    print(json.dumps(layers_table(found), indent=1))
    convention_gate(found)
    assert max(found.ratios) < 0.1
    assert found.argmax_agreed >= 0.99 * found.argmax_counted > 100
    assert found.own_agreed == found.own_counted > 0


def test_ids_shifted_by_one_stop_with_their_offset(bench: Bench, shifted: Serving) -> None:
    found = bench.measure(shifted)
    with pytest.raises(GateError) as caught:
        convention_gate(found)
    sentence = "captured taps 3, 16, 28 where 2, 15, 27 were asked: ids are off by +1 for engine vllm version "
    assert sentence + shifted.context.versions["vllm"] in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("swap", "convention gate: taps 15 and 27 are swapped."),
        ("post_norm", "convention gate: the final state is post-norm where pre-norm was expected."),
    ],
)
def test_a_connector_that_gives_other_states_stops(bench: Bench, planted: Planted, fault: str, sentence: str) -> None:
    found = bench.measure(planted.plant(fault))
    with pytest.raises(GateError) as caught:
        convention_gate(found)
    assert str(caught.value).startswith(sentence)
