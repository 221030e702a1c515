import random
from dataclasses import replace

import pytest

from infra.config.round import PrepareConfig
from infra.data.build import HELD_OUT_ONCE, BuildReport, build_samples
from infra.errors import GateError
from infra.store.answers import Answer, Status
from infra.store.sample_ids import SampleId


def answer(
    name: str, turn: int = 0, prompt: int = 5, tokens: int = 3, status: Status = "ok", reason: str = "stop"
) -> Answer:
    return Answer(
        sample_id=f"{name}#{turn}",
        messages=[{"role": "user", "content": name}, {"role": "assistant", "content": "yes"}],
        prompt_ids=list(range(prompt)),
        answer_ids=list(range(100, 100 + tokens)),
        finish_reason=reason,
        engine="vllm 0.32.0",
        sampling={"temperature": 0.0},
        status=status,
        turn=turn,
    )


def many(conversations: int, turns: int = 2) -> list[Answer]:
    return [answer(f"c#{number}", turn) for number in range(conversations) for turn in range(turns)]


def train(report: BuildReport) -> set[str]:
    return {SampleId.read(sample.sample_id).prompt for sample in report.samples if sample.split == "train"}


def heldout(report: BuildReport) -> set[str]:
    return {SampleId.read(sample.sample_id).prompt for sample in report.samples if sample.split == "heldout"}


def test_a_sample_is_prompt_and_answer_with_the_answer_supervised() -> None:
    sample = next(s for s in build_samples(many(4), PrepareConfig()).samples if s.sample_id == "c#2#1")
    assert sample.input_ids == [0, 1, 2, 3, 4, 100, 101, 102]
    assert sample.loss_mask == [0, 0, 0, 0, 0, 1, 1, 1]
    assert (sample.finish_reason, sample.engine, sample.sampling) == ("stop", "vllm 0.32.0", {"temperature": 0.0})
    assert sample.messages[0]["content"] == "c#2"


def test_rows_are_the_same_whatever_the_order_of_the_answers() -> None:
    answers = many(50)
    report = build_samples(answers, PrepareConfig())
    for seed in range(3):
        assert build_samples(random.Random(seed).sample(answers, len(answers)), PrepareConfig()) == report
    assert [sample.row for sample in report.samples] == list(range(100))
    splits = [sample.split for sample in report.samples]
    assert splits == ["train"] * 90 + ["heldout"] * 10


def test_a_conversation_is_on_one_side_and_the_share_is_exact() -> None:
    report = build_samples(many(43, turns=3), PrepareConfig(heldout=0.2))
    assert not train(report) & heldout(report)
    assert (len(train(report)), len(heldout(report))) == (34, 9)


def test_all_answers_to_a_prompt_are_on_one_side_and_held_out_ones_have_one() -> None:
    """Of a held-out prompt the first answer is kept: the others are sampled otherwise than it is served."""
    several = [replace(one, sample_id=f"{one.sample_id}.{number}") for one in many(20) for number in (1, 2)]
    report = build_samples([*many(20), *several], PrepareConfig(heldout=0.2))
    assert not train(report) & heldout(report)
    assert (len(train(report)), len(heldout(report))) == (16, 4)
    assert [sample.split for sample in report.samples] == ["train"] * 16 * 2 * 3 + ["heldout"] * 4 * 2
    assert report.dropped == {HELD_OUT_ONCE: 4 * 2 * 2}
    assert heldout(report) == heldout(build_samples(many(20), PrepareConfig(heldout=0.2)))


def test_a_prompt_whose_first_answer_is_of_no_use_is_not_held_out() -> None:
    answers = [answer("a", status="empty", tokens=0), replace(answer("a"), sample_id="a#0.1"), *many(2, turns=1)]
    for seed in range(8):
        assert "a" in train(build_samples(answers, PrepareConfig(heldout=0.9), seed=seed))


def test_the_seed_decides_the_split() -> None:
    assert heldout(build_samples(many(50), PrepareConfig(), seed=1)) != heldout(
        build_samples(many(50), PrepareConfig(), seed=2)
    )


@pytest.mark.parametrize(("share", "held"), [(0.01, 1), (0.5, 1), (0.99, 1)])
def test_neither_split_is_ever_empty(share: float, held: int) -> None:
    report = build_samples(many(2), PrepareConfig(heldout=share))
    assert (len(train(report)), len(heldout(report))) == (1, held)


def test_one_conversation_cannot_be_split() -> None:
    with pytest.raises(GateError, match="one conversation is left"):
        build_samples(many(1), PrepareConfig())


def test_nothing_answered_is_reported_not_hidden() -> None:
    report = build_samples([answer("a", status="refused", tokens=0)], PrepareConfig())
    assert (report.samples, report.answers, report.refused) == ([], 1, 1)


def test_what_became_of_every_answer_is_counted() -> None:
    answers = [
        *many(3, turns=1),
        answer("long", reason="length"),
        answer("empty", status="empty", tokens=0),
        answer("blank", tokens=0),
        answer("refused", status="refused", tokens=0),
        answer("edge", status="dropped", reason="boundary", tokens=0),
        answer("new", status="dropped", reason="rewritten", tokens=0),
        answer("old", status="dropped", reason="rewritten", tokens=0),
    ]
    report = build_samples(answers, PrepareConfig())
    assert (report.answers, report.truncated, report.empty, report.refused, report.cut) == (10, 1, 2, 1, 0)
    assert report.dropped == {"boundary": 1, "rewritten": 2}
    assert {SampleId.read(sample.sample_id).prompt for sample in report.samples} == {"c#0", "c#1", "c#2", "long"}


def test_long_samples_are_cut_with_their_masks_and_counted() -> None:
    fits, cut, full = answer("fits", prompt=5), answer("cut", prompt=6), answer("full", prompt=8)
    report = build_samples([fits, cut, full, answer("d", prompt=1)], PrepareConfig(max_tokens=8))
    found = {sample.sample_id: sample for sample in report.samples}
    assert set(found) == {"fits#0", "cut#0", "d#0"}
    assert found["cut#0"].input_ids == [0, 1, 2, 3, 4, 5, 100, 101]
    assert found["cut#0"].loss_mask == [0, 0, 0, 0, 0, 0, 1, 1]
    assert found["fits#0"].loss_mask == [0, 0, 0, 0, 0, 1, 1, 1]
    assert (report.cut, report.dropped) == (1, {"no room for the answer": 1})


def test_a_repeated_answer_stays_visible_to_the_gate() -> None:
    answers = many(3)
    report = build_samples([*answers, replace(answers[0])], PrepareConfig())
    assert len(report.samples) == 7
