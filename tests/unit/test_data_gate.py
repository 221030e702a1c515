from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from infra.config.round import GenerateConfig
from infra.data.build import BuildReport
from infra.data.gate import data_gate, leakage_gate, template_gate
from infra.data.prompts import Prompt
from infra.errors import GateError
from infra.store.samples import Sample


def samples(count: int = 10, held: int = 2) -> list[Sample]:
    return [
        Sample(
            row=row,
            sample_id=f"p{row}#0",
            messages=[{"role": "user", "content": f"Question {row}"}],
            input_ids=[1, 2, 3, 4],
            loss_mask=[0, 0, 1, 1],
            split="train" if row < count - held else "heldout",
            finish_reason="stop",
            engine="vllm",
            sampling={},
        )
        for row in range(count)
    ]


def prompt(name: str, text: str, *turns: str) -> Prompt:
    return Prompt(name, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}], list(turns))


TRAINING = [prompt(f"p{row}", f"Question {row}", "Make it shorter.") for row in range(10)]
EVALUATION = [prompt("e0", "Something else", "Make it shorter."), prompt("e1", "Question 11")]


def check(found: list[Sample], report: BuildReport | None = None, **changes: Any) -> None:
    generate = changes.pop("generate", GenerateConfig(max_truncated=0.5))
    known: dict[str, Any] = {"vocab_size": 5, "training": TRAINING, "evaluation": EVALUATION} | changes
    data_gate(found, report or BuildReport(found, answers=len(found)), generate, **known)


def test_right_samples_pass() -> None:
    check(samples())


def all_masks(value: int) -> Callable[[list[Sample]], list[Sample]]:
    return lambda found: [replace(sample, loss_mask=[value] * 4) for sample in found]


def with_third(**fields: Any) -> Callable[[list[Sample]], list[Sample]]:
    return lambda found: [*found[:2], replace(found[2], **fields), *found[3:]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda found: [], "there are no samples"),
        (all_masks(0), "0% of 40 tokens are supervised"),
        (all_masks(1), "100% of 40 tokens are supervised"),
        (with_third(loss_mask=[0, 0, 0, 0]), "p2#0 has no supervised token"),
        (with_third(loss_mask=[0, 1, 1]), "p2#0 has 4 tokens, and 3 mask values"),
        (with_third(loss_mask=[0, 0, 1, 2]), "p2#0 has 4 tokens, and 4 mask values"),
        (with_third(input_ids=[], loss_mask=[]), "p2#0 has 0 tokens"),
        (with_third(input_ids=[1, 2, 5, 4]), r"p2#0 has ids 1 to 5.*ids from 0 to 4"),
        (with_third(input_ids=[1, -1, 3, 4]), "p2#0 has ids -1 to 4"),
        (with_third(sample_id="p1#0"), "sample id p1#0 comes twice"),
        (with_third(row=7), "p2#0 at place 2 has row 7"),
        (lambda found: found[:2] + found[3:], "p3#0 at place 2 has row 3"),
        (with_third(split="heldout"), "training row 3 comes after held-out row 2"),
        (lambda found: found[:8], "no samples for .'heldout'"),
        (lambda found: [replace(sample, split="heldout") for sample in found], "no samples for .'train'"),
    ],
)
def test_wrong_samples_are_stopped(spoil: Callable[[list[Sample]], list[Sample]], message: str) -> None:
    with pytest.raises(GateError, match=f"data gate: .*{message}") as caught:
        check(spoil(samples()), BuildReport([], answers=10))
    assert caught.value.gate == "data"
    assert caught.value.expected
    assert caught.value.fix


@pytest.mark.parametrize(
    ("within", "above", "message"),
    [
        ({"truncated": 50}, {"truncated": 51}, r"51 of 100 answers are cut .*: 51\.0%.*at most 50\.0%.*max_truncated"),
        ({"empty": 5}, {"empty": 6}, r"6 of 100 answers are empty: 6\.0%.*at most 5\.0%.*max_empty"),
        ({"refused": 5}, {"refused": 6}, r"6 of 100 answers cannot be used \(6 refused by the engine\)"),
        (
            {"dropped": {"rewritten": 5}},
            {"dropped": {"rewritten": 4, "boundary": 2}},
            "0 refused by the engine, 4 rewritten, 2 boundary",
        ),
    ],
)
def test_shares_are_bounded(within: dict[str, Any], above: dict[str, Any], message: str) -> None:
    found = samples()
    check(found, BuildReport(found, answers=100, **within))
    with pytest.raises(GateError, match=message):
        check(found, BuildReport(found, answers=100, **above))


def test_an_evaluation_prompt_that_is_trained_on_is_stopped() -> None:
    with pytest.raises(GateError, match=r"1 of 3 evaluation prompts are training prompts too: e2 \(trained on as p7\)"):
        check(samples(), evaluation=[*EVALUATION, prompt("e2", "  question\n7")])


def test_leakage_looks_at_later_training_turns_but_not_at_later_evaluation_turns() -> None:
    leakage_gate(TRAINING, [prompt("e0", "New", "Question 3", "Make it shorter.")])
    with pytest.raises(GateError, match="e0"):
        leakage_gate(TRAINING, [prompt("e0", "Make it SHORTER.")])


def test_template_and_engine_agree_or_the_first_difference_is_named() -> None:
    def decode(ids: list[int]) -> str:
        return "".join(map(chr, ids))

    ours = [ord(letter) for letter in "the same beginning, then this"]
    template_gate(ours, list(ours), decode)
    theirs = [ord(letter) for letter in "the same beginning, then that"]
    with pytest.raises(
        GateError,
        match=r"differ from token 27 on \(29 tokens here, 29 there\): after ' then th' comes 'is' here and 'at' in",
    ):
        template_gate(ours, theirs, decode)
    with pytest.raises(GateError, match=r"differ from token 29 on .* comes '' here and '!' in the engine"):
        template_gate(ours, [*ours, ord("!")], decode)
    with pytest.raises(
        GateError, match=r"differ from token 0 on .* after '' comes 'the same' here and '#the sam' in the engine"
    ):
        template_gate(ours, [ord("#"), *ours], decode)
