import subprocess
import sys
from pathlib import Path

import pytest

from infra.data.builtin import SLOT, Split, builtin, templates
from infra.data.gate import leakage_gate
from infra.data.prompts import Prompt, prompts_digest
from infra.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
# What seed 0 gives; a change of templates or words changes it, and with it the key of every round that uses them.
TRAIN_400 = "3fef25eb28bb1bd1"


def texts(prompt: Prompt) -> tuple[str, ...]:
    return prompt.messages[0]["content"], *prompt.turns


@pytest.mark.parametrize(("split", "count"), [("train", 400), ("train", 3000), ("heldout", 100), ("heldout", 500)])
def test_as_many_different_prompts_as_asked_for(split: Split, count: int) -> None:
    prompts = builtin(split, count)
    assert len(prompts) == count
    assert len({prompt.id for prompt in prompts}) == count
    assert len({texts(prompt) for prompt in prompts}) == count


def test_every_slot_is_filled() -> None:
    for split in ("train", "heldout"):
        for prompt in builtin(split, 1000, seed=3):
            assert not any(SLOT.search(text) for text in texts(prompt))


def test_a_seed_gives_the_same_prompts_everywhere() -> None:
    script = (
        "from infra.data.builtin import builtin; from infra.data.prompts import Prompt, prompts_digest as digest; "
        "print(digest(builtin('train', 400)))"
    )
    other = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert other.stdout.strip() == prompts_digest(builtin("train", 400)) == TRAIN_400, other.stderr


def test_another_seed_gives_others_and_a_smaller_count_the_first_of_them() -> None:
    assert builtin("train", 50, seed=1) != builtin("train", 50, seed=2)
    assert builtin("train", 50, seed=1) == builtin("train", 400, seed=1)[:50]


def test_kinds_are_mixed_and_some_prompts_have_several_turns() -> None:
    wanted: dict[Split, int] = {"train": 14, "heldout": 12}
    for split, kinds in wanted.items():
        prompts = builtin(split, 100)
        assert len({prompt.meta["kind"] for prompt in prompts}) >= kinds
        assert 5 <= sum(bool(prompt.turns) for prompt in prompts) <= 30


def test_heldout_shares_no_template_and_no_passage() -> None:
    forms = {
        split: {turn for template in templates(split) for turn in template.turns} for split in ("train", "heldout")
    }
    assert not forms["train"] & forms["heldout"]
    passages = {
        split: {word for t in templates(split) for words in t.slots.values() for word in words if len(word) > 150}
        for split in forms
    }
    assert passages["train"]
    assert passages["heldout"]
    assert not passages["train"] & passages["heldout"]
    leakage_gate(builtin("train", 3000), builtin("heldout", 500))


def test_a_template_never_repeats_a_word_in_numbered_slots() -> None:
    template = next(t for t in templates("heldout") if set(t.slots) == {"hobby", "hobby2"})
    words = len(template.slots["hobby"])
    fillings = [turns for number in range(template.size) if (turns := template.fill(number))]
    assert len(set(fillings)) == len(fillings) == template.usable == words * (words - 1)


def test_more_than_there_are_is_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match=r"builtin:heldout has \d{6} prompts, fewer than the 100000000 asked for"):
        builtin("heldout", 100_000_000)
