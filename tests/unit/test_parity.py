"""The parity gate on states made here: right ones pass, each kind of fault stops with its own sentence."""

from collections.abc import Callable, Sequence

import pytest
import torch
from standin.sample_report import build
from standin.tiny import random_llama

from infra.config.round import RoundConfig, TargetShape
from infra.config.training import TrainConfig
from infra.engines.client.extraction import States
from infra.errors import ConfigError, GateError
from infra.gates.agreement import Layers, Side, compare
from infra.gates.capture import Head
from infra.gates.parity import alone, parity_gate
from infra.report import markdown
from infra.report.layers import parity_figure, parity_table, parity_text
from infra.results import Parity
from infra.targets.target import Target

LAYERS, TAPS = 12, (2, 5, 9)
LENGTHS = (96, 40, 17)
ONE, OTHER = "vllm 0.32.0", "sglang 0.5.23"
Stream = list[torch.Tensor]
Change = Callable[[Stream, Head], Sequence[torch.Tensor]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    model = random_llama(folder, 320, torch.float32)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.2, 3.0)
    model.save_pretrained(folder)
    shape = TargetShape(layers=LAYERS, hidden_size=64, vocab_size=320, weight_bytes=1, family="llama")
    return Target(name="tiny", path=folder, shape=shape, revision="0" * 16)


@pytest.fixture(scope="module")
def head(target: Target) -> Head:
    return Head(target)


@pytest.fixture(scope="module")
def stream() -> Stream:
    """A residual stream: taps 0 to L, each [tokens, hidden], every layer about 0.25 away from the one before."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(sum(LENGTHS), 64, generator=generator)
    found = [states]
    for _ in range(LAYERS):
        step = torch.randn(states.shape, generator=generator) * states.norm(dim=-1, keepdim=True) / 8
        states = states + 0.25 * step
        found.append(states)
    found[7][3] *= 400  # a token with a huge state, as attention sinks have
    return found


def engine(name: str, slots: Sequence[torch.Tensor], noise: float = 0.03, seed: int = 1) -> Side:
    """A side with these slots, in bfloat16 and with an engine's noise."""
    generator = torch.Generator().manual_seed(seed)
    joined = torch.stack(list(slots), dim=1)
    joined = joined + noise * torch.randn(joined.shape, generator=generator) * joined.norm(dim=-1, keepdim=True) / 8
    parts = joined.to(torch.bfloat16).split(LENGTHS)
    return Side(name, [States(part, torch.arange(len(part)) + 7, 0) for part in parts], [[1, 2]])


def right(stream: Stream, head: Head) -> list[torch.Tensor]:
    return [*(stream[tap] for tap in TAPS), stream[LAYERS]]


def unit_rms(stream: Stream, head: Head) -> list[torch.Tensor]:
    """As SGLang's: the state after the norm, divided by the norm's weight."""
    weight = head.normed(torch.ones(64))
    return [*right(stream, head)[:-1], head.normed(stream[LAYERS]) / weight]


def shifted(stream: Stream, head: Head) -> list[torch.Tensor]:
    return [*(stream[tap + 1] for tap in TAPS), stream[LAYERS]]


def one_shifted(stream: Stream, head: Head) -> list[torch.Tensor]:
    return [stream[2], stream[4], stream[9], stream[LAYERS]]


def swapped(stream: Stream, head: Head) -> list[torch.Tensor]:
    return [stream[9], stream[5], stream[2], stream[LAYERS]]


def post_norm(stream: Stream, head: Head) -> list[torch.Tensor]:
    return [*right(stream, head)[:-1], head.normed(stream[LAYERS])]


def layer_before(stream: Stream, head: Head) -> list[torch.Tensor]:
    return [*right(stream, head)[:-1], stream[LAYERS - 1]]


def cut(stream: Stream, head: Head) -> list[torch.Tensor]:
    """From position 64 of the long sequence on, states of other tokens."""
    slots = [slot.clone() for slot in right(stream, head)]
    for slot in slots:
        slot[64:96] = slot[64:96].flip(0).roll(5, 0)
    return slots


def compared(target: Target, head: Head, stream: Stream, change: Change, reference: bool = True) -> Parity:
    one, other = engine(ONE, right(stream, head)), engine(OTHER, change(stream, head), seed=2)
    whole = torch.stack(stream, dim=1)
    layers = Layers([whole[:96], whole[96:120]], head) if reference else None
    return compare(target, TAPS, one, other, layers, head)


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("change", [right, unit_rms])
def test_engines_that_agree_pass(target: Target, head: Head, stream: Stream, change: Change, reference: bool) -> None:
    found = compared(target, head, stream, change, reference)
    parity_gate(found)
    assert [tap.tap for tap in found.taps] == [*TAPS, LAYERS]
    assert all(0.02 < tap.median < 0.08 for tap in found.taps)
    assert found.argmax >= 0.95
    assert found.argmax_counted > 50
    assert all(tap.neighbour == (pytest.approx(0.25, abs=0.1) if reference else None) for tap in found.taps)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (shifted, r"tap 2 differs by 0\.2.* gives tap 3 where 2 was asked: off by \+1; tap 5 .*layer_ids\.py"),
        (one_shifted, r"sglang 0\.5\.23 gives tap 4 where 5 was asked: off by -1\..*layer_ids\.py"),
        (swapped, r"sglang 0\.5\.23 gives tap 9 where 2 was asked: its slots are in another order"),
        (post_norm, r"the final state differs .* sglang 0\.5\.23 gives the state after the final norm.*divided by"),
        (layer_before, r"parity gate: .*: the final state differs by 0\.2.*median, bound"),
        (cut, r"tap 2 differs by 1\.\d+ from position 64 on and agrees before it; .*chunked prefill"),
    ],
)
def test_each_fault_stops_with_its_own_sentence(
    target: Target, head: Head, stream: Stream, change: Change, sentence: str
) -> None:
    found = compared(target, head, stream, change)
    with pytest.raises(GateError, match=sentence) as caught:
        parity_gate(found)
    assert str(caught.value).startswith(f"parity gate: {OTHER} does not compute what {ONE} computes for the same 153")


def test_the_engine_that_is_off_is_named_also_when_it_is_the_extracting_one(
    target: Target, head: Head, stream: Stream
) -> None:
    one, other = engine(ONE, shifted(stream, head)), engine(OTHER, right(stream, head), seed=2)
    found = compare(target, TAPS, one, other, Layers(torch.stack(stream, dim=1).split(LENGTHS), head), head)
    with pytest.raises(GateError, match=r"vllm 0\.32\.0 gives tap 3 where 2 was asked: off by \+1"):
        parity_gate(found)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (shifted, r"tap 2 differs by 0\.2\d*.* bound 0\.1;"),
        (swapped, r"sglang 0\.5\.23 gives at tap 2 what vllm 0\.32\.0 gives at tap 9"),
        (post_norm, r"sglang 0\.5\.23 gives the state after the final norm"),
    ],
)
def test_faults_stop_without_a_reference(
    target: Target, head: Head, stream: Stream, change: Change, sentence: str
) -> None:
    with pytest.raises(GateError, match=sentence):
        parity_gate(compared(target, head, stream, change, reference=False))


def test_tokens_that_the_final_states_disagree_on_stop(target: Target, head: Head, stream: Stream) -> None:
    found = compared(target, head, stream, right)
    parity_gate(found.model_copy(update={"argmax": 0.96}))
    parity_gate(found.model_copy(update={"argmax": 0.5, "argmax_counted": 10}))
    with pytest.raises(GateError, match=r"lead to the same token at 94\.0% of 100 positions \(3 near-ties apart\)"):
        parity_gate(found.model_copy(update={"argmax": 0.94, "argmax_counted": 100, "near_ties": 3}))


def test_other_tokenisers_stop_first(target: Target, head: Head, stream: Stream) -> None:
    found = compared(target, head, stream, shifted)
    with pytest.raises(GateError, match="parity gate: x turns conversation 0 into 9 tokens.*chat template"):
        parity_gate(found.model_copy(update={"tokeniser_fault": "x turns conversation 0 into 9 tokens"}))


def test_states_of_other_tokens_cannot_be_compared(target: Target, head: Head, stream: Stream) -> None:
    one, other = engine(ONE, right(stream, head)), engine(OTHER, right(stream, head))
    other.states[1].token_ids[0] += 1
    with pytest.raises(ValueError, match="same sequences"):
        compare(target, TAPS, one, other, None, head)


def test_it_can_be_shown(target: Target, head: Head, stream: Stream) -> None:
    found = compared(target, head, stream, shifted)
    table = parity_table(found)
    assert [row["tap"] for row in table] == ["2", "5", "9", "final (12)"]
    assert "off by +1" in table[0]["seen"]
    assert table[3]["seen"] == ""
    assert "153 tokens in 3 sequences" in parity_text(found)
    assert parity_figure(found).startswith(b"\x89PNG")
    assert Parity.model_validate_json(found.model_dump_json()) == found
    text = markdown.report(build().model_copy(update={"parity": found}), {"parity": "parity.png"})
    assert "## Parity" in text
    assert "gives tap 3 where 2 was asked: off by +1 |" in text
    assert "(parity.png)" in text
    assert "## Parity" not in markdown.report(build(), {})


def test_a_round_for_one_engine_alone_has_a_name_of_its_own() -> None:
    config = RoundConfig.model_validate(
        {"name": "mine", "target": {"name": "t"}, "extract": {"taps": [1]}, "engines": {"vllm": {}, "sglang": {}}}
    )
    only = alone(config, "sglang", 3)
    assert (only.name, only.extract.engine, only.serve_with, only.gates.parity.samples) == (
        "parity-mine", "sglang", "sglang", 3,
    )  # fmt: skip
    assert alone(config.model_copy(update={"train": TrainConfig(devices=8)}), "sglang", 3).train.devices == 1
    with pytest.raises(ConfigError, match="describes only"):
        alone(config.model_copy(update={"engines": {"vllm": config.engines["vllm"]}}), "sglang", 3)
