"""The convention gate on a tiny random Llama: right states pass, each kind of wrong ones has a sentence."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from standin.sample_report import build
from standin.tiny import NAME, VOCABULARY, random_llama, small_round
from transformers import LlamaForCausalLM

from infra.config.load import build_round
from infra.config.settings import Settings
from infra.engines.client.extraction import States
from infra.engines.reference.process import ReferenceStates
from infra.errors import GateError
from infra.gates.convention import Truth, convention_gate, measure, unchecked
from infra.report import markdown
from infra.report.layers import layers_figure, layers_table, layers_text
from infra.round.context import RoundContext

TAPS = (1, 2, 3)
SEQUENCES = [[(7 * start + 3 * place) % VOCABULARY for place in range(24)] for start in range(4)]
Change = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
"""Makes wrong states: from the right ones [tokens, taps + 1, hidden] and all layers, the normed state last."""


class Tiny:
    """The round, and what its target computes."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.model: LlamaForCausalLM = random_llama(folder / NAME, VOCABULARY, torch.float32)
        with torch.no_grad():
            self.model.model.norm.weight.uniform_(0.5, 1.5)
        self.model.save_pretrained(folder / NAME)
        fields = small_round(Path("prompts.jsonl"), Path("evaluation.jsonl"))
        fields["extract"] |= {"taps": list(TAPS), "engine": engine}
        fields["engines"]["sglang"] = fields["engines"]["vllm"]
        self.round = RoundContext(build_round(fields), Settings(state_dir=folder / "state", models_path=folder))
        self.round.__dict__["versions"] = {"vllm": "0.32.0", "sglang": "0.5.23"}

    def layers(self, tokens: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """([tap 0 to L, the normed state], argmax tokens)."""
        final: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda module, args: final.append(args[0][0]))
        with torch.inference_mode():
            output = self.model(torch.tensor([tokens]), output_hidden_states=True)
        hook.remove()
        hidden = [layer[0] for layer in output.hidden_states]
        return [*hidden[:-1], final[0], hidden[-1]], output.logits[0].argmax(-1)

    def truth(self) -> Truth:
        states = []
        for tokens in SEQUENCES:
            layers, best = self.layers(tokens)
            states.append(ReferenceStates(torch.stack(layers[:-1], dim=1), layers[-1], best))
        return Truth(states, "whole, float32 on cpu")

    def captured(self, change: Change | None = None, next_token: int | None = None) -> list[States]:
        found = []
        for tokens in SEQUENCES:
            layers, best = self.layers(tokens)
            right = torch.stack([layers[tap] for tap in (*TAPS, 4)], dim=1)
            states = change(right, layers) if change else right
            token = int(best[-1]) if next_token is None else next_token
            found.append(States(states.to(torch.bfloat16), torch.tensor(tokens), token))
        return found


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path, "vllm")


def picked(*taps: int) -> Change:
    return lambda right, layers: torch.stack([layers[tap] for tap in taps], dim=1)


def rolled(right: torch.Tensor, layers: list[torch.Tensor]) -> torch.Tensor:
    return right.roll(1, dims=0)


def test_right_states_pass(tiny: Tiny) -> None:
    found = measure(tiny.round, tiny.captured(), tiny.truth())
    convention_gate(found)
    assert found.engine == "vllm 0.32.0"
    assert [len(row) for row in found.medians] == [5] * 4
    assert max(found.ratios) < 0.05
    assert found.argmax_agreed == found.argmax_counted > 80
    assert found.own_agreed == found.own_counted > 0
    assert "captures the taps it was asked for" in layers_text(found)
    assert [line["tap k"] for line in layers_table(found)] == ["1", "2", "3", "final (4)"]
    assert layers_figure(found) is not None
    assert type(found).model_validate_json(found.model_dump_json()) == found


def test_the_report_says_what_was_measured_or_that_nothing_was(tiny: Tiny) -> None:
    found = measure(tiny.round, tiny.captured(), tiny.truth())
    text = markdown.report(build(convention=found), {"layers": "layers.png"})
    assert "## Layers\n\nvllm 0.32.0 captures the taps it was asked for." in text
    assert "| final (4) |" in text
    assert "](layers.png)" in text
    assert "## Layers\n\nWhich layers the engine captured is not told" in markdown.report(build(), {})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (picked(2, 3, 4, 4), "captured taps 2, 3, 4 where 1, 2, 3 were asked: ids are off by +1 for engine vllm"),
        (picked(1, 3, 2, 4), "taps 2 and 3 are swapped"),
        (picked(1, 2, 3, 3), "captured tap 3 where 4 was asked: ids are off by -1 for engine vllm version 0.32.0"),
        (picked(1, 2, 3, 5), "the final state is post-norm where pre-norm was expected"),
        (rolled, "what came as tap 1 is no layer of the reference: the nearest is tap"),
    ],
)  # fmt: skip
def test_wrong_states_stop_the_round(tiny: Tiny, change: Change, sentence: str) -> None:
    found = measure(tiny.round, tiny.captured(change), tiny.truth())
    with pytest.raises(GateError, match=re.escape(sentence)) as caught:
        convention_gate(found)
    assert caught.value.gate == "convention"
    assert sentence in layers_text(found)


def test_sglangs_final_state_is_judged_after_the_norm(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, "sglang")

    def divided(right: torch.Tensor, layers: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([right[:, :-1], (layers[-1] / tiny.model.model.norm.weight.detach())[:, None]], dim=1)

    convention_gate(measure(tiny.round, tiny.captured(divided), tiny.truth()))
    found = measure(tiny.round, tiny.captured(picked(1, 2, 3, 5)), tiny.truth())
    assert found.fault == "the final state is post-norm where the norm's output divided by its weight was expected"


def test_without_a_reference_the_engines_own_tokens_judge_the_final_state_and_the_report_says_so(tiny: Tiny) -> None:
    none = Truth(why="it needs 547.0 GB streamed, and 24.0 GB of memory are free")
    found = measure(tiny.round, tiny.captured(), none)
    convention_gate(found)
    text = layers_text(found)
    assert "were not compared with a reference**: it needs 547.0 GB" in text
    assert f"own next tokens (here in {found.own_agreed} of {found.own_counted} prompts" in text
    assert layers_figure(found) is None

    wrong = measure(tiny.round, tiny.captured(next_token=0), none)
    with pytest.raises(GateError, match="final states lead to the engine's own next token in [01] of [34] prompts"):
        convention_gate(wrong)


def test_a_round_that_asks_for_no_reference_is_told_so(tiny: Tiny) -> None:
    found = unchecked(tiny.round)
    convention_gate(found)
    assert "gates.convention.reference is `none`" in layers_text(found)


def test_a_norm_that_is_not_plain_is_refused(tiny: Tiny) -> None:
    truth = tiny.truth()
    shifted: list[Any] = [ReferenceStates(item.hidden, item.normed * 1.5, item.next_tokens) for item in truth.states]
    with pytest.raises(GateError, match="the target's final norm differs by 0.33 from a plain RMSNorm"):
        measure(tiny.round, tiny.captured(), Truth(shifted, "whole"))
