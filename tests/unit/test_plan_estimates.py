"""The plan's speeds against what was measured, and its memory against what the round says."""

import re
from pathlib import Path
from typing import Any

import pytest

from infra.config.load import build_round, load_round, round_file
from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.errors import GateError
from infra.round import rates
from infra.round.context import RoundContext
from infra.round.needs import WINDOW_BYTES, extraction_window, longest_sample
from infra.steps.plan import Plan, make_plan, plan_gate

GIB = 1 << 30
LLAMA_8B = {"layers": 32, "hidden_size": 4096, "vocab_size": 128256, "weight_bytes": 16_060_000_000, "family": "llama"}
SMOLLM2 = {"layers": 30, "hidden_size": 576, "vocab_size": 49152, "weight_bytes": 269_060_552, "family": "llama"}
FACTOR = 1.5

CPU_ROUNDS = ("smoke", "laptop")


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("infra.steps.plan.memory_available", lambda: 128 * GIB)


def config(shape: dict[str, Any], **overrides: Any) -> RoundConfig:
    """A round on one H200; overrides by dotted name with ``__`` for the dot."""
    fields = {
        "name": "box",
        "target": {"name": "box-target", "shape": shape},
        "prompts": {"count": 200, "max_prompt_tokens": 1024},
        "generate": {"max_tokens": 200, "concurrency": 64},
        "prepare": {"heldout": 0.1, "max_tokens": 1536, "draft_vocab_size": 16384},
        "extract": {"taps": [2, 15, 27], "concurrency": 64},
        "train": {"epochs": 5, "sequence_tokens": 4096},
        "engines": {"vllm": {"max_model_len": 4096}},
    }
    return build_round(fields, {name.replace("__", "."): value for name, value in overrides.items()})


def plan(shape: dict[str, Any], **overrides: Any) -> Plan:
    return make_plan(RoundContext(config(shape, **overrides), Settings()))


def samples_of(tokens: int, shape: dict[str, Any]) -> dict[str, Any]:
    """Overrides that make the mean sample so long."""
    probe = plan(shape, generate__expected_tokens=1)
    prompt = round(probe.prompt_tokens / probe.samples)
    return {"generate__expected_tokens": max(1, tokens - prompt), "generate__max_tokens": 1024}


def close(estimate: float, *measured: float) -> bool:
    """Whether the estimate is within the factor of each figure."""
    return all(1 / FACTOR <= estimate / figure <= FACTOR for figure in measured)


@pytest.mark.parametrize(
    ("shape", "tokens", "measured"),
    [(LLAMA_8B, 1024, (12_050,)), (SMOLLM2, 256, (43_000, 37_000)), (SMOLLM2, 1024, (62_000,))],
)
def test_extraction_is_planned_as_it_was_measured_through_this_project(
    shape: dict[str, Any], tokens: int, measured: tuple[float, ...]
) -> None:
    found = plan(shape, **samples_of(tokens, shape))
    assert found.tokens / found.samples == pytest.approx(tokens, rel=0.15)
    assert close(found.rates.extract_tokens, *measured), found.rates.extract_tokens


@pytest.mark.parametrize("concurrency", [64, 256, 768])
def test_the_round_of_7000_prompts_is_planned_as_it_went(concurrency: int) -> None:
    """904,405 answer tokens at 15.6k a second, training at 74.6k, 843 s in all."""
    found = plan(SMOLLM2, prompts__count=7000, generate__expected_tokens=129, generate__concurrency=concurrency)
    assert close(found.rates.generate_tokens, 15_600)
    assert close(found.rates.train_tokens, 74_600)
    assert close(found.seconds, 843), found.seconds


def test_what_bounds_a_step_decides_its_rate() -> None:
    """Fewer requests in flight, more taps, more draft steps: slower, and only there."""
    base = plan(LLAMA_8B).rates
    alone = plan(LLAMA_8B, generate__concurrency=1).rates
    assert alone.generate_tokens < 0.1 * base.generate_tokens
    assert alone.extract_tokens == base.extract_tokens
    assert plan(LLAMA_8B, extract__taps=[2, 9, 15, 21, 27]).rates.extract_tokens < 0.75 * base.extract_tokens
    assert plan(LLAMA_8B, train__draft_steps=6).rates.train_tokens < 0.75 * base.train_tokens
    assert plan(LLAMA_8B, evaluate__concurrencies=[1]).rates.serve_tokens < base.serve_tokens
    # An engine that is itself the slower one bounds extraction.
    slow = {**LLAMA_8B, "weight_bytes": 160_000_000_000}
    assert plan(slow).rates.extract_tokens == pytest.approx(43_000 / 10, rel=0.01)
    eight = plan(slow, engines__vllm__tensor_parallel=8)
    assert eight.rates.extract_tokens == base.extract_tokens


def test_servers_that_are_launched_one_after_another_take_their_starts() -> None:
    def evaluation(layout: str) -> float:
        return next(step.seconds for step in plan(LLAMA_8B, evaluate__layout=layout).steps if step.step == "eval")

    start = plan(LLAMA_8B).rates.start_seconds
    assert evaluation("auto") == evaluation("abba")
    assert evaluation("abba") - evaluation("interleaved") == pytest.approx(1.5 * start, rel=0.01)


def test_memory_of_a_gpu_round_follows_from_the_round() -> None:
    base, shape = plan(LLAMA_8B), config(LLAMA_8B).target.shape
    assert shape is not None
    wide = config(LLAMA_8B, extract__concurrency=1024, prompts__count=4000)
    window = extraction_window(wide, shape, 10**6)
    assert longest_sample(wide) == 1024 + 200
    sample, two_objects = (1024 + 200) * 4 * 4096 * 2, 2 * (64 << 20)
    assert window == WINDOW_BYTES + two_objects, "bounded in bytes, whatever the concurrency"
    assert extraction_window(config(LLAMA_8B), shape, 10**6) == 64 * sample + two_objects
    assert extraction_window(wide, shape, 3) == 3 * sample + two_objects
    endless = config(
        LLAMA_8B,
        prompts__max_prompt_tokens=1 << 19,
        prepare__max_tokens=1 << 19,
        generate__max_tokens=1,
        engines__vllm__max_model_len=1 << 20,
    )
    assert extraction_window(endless, shape, 10) == (1 << 19) * 4 * 4096 * 2 + two_objects, "one sample always flies"
    assert plan(LLAMA_8B, extract__concurrency=1024, prompts__count=4000).memory_bytes > base.memory_bytes
    longer = config(LLAMA_8B, prompts__max_prompt_tokens=3000, prepare__max_tokens=4000)
    assert extraction_window(longer, shape, 10**6) == 64 * (3000 + 200) * 4 * 4096 * 2 + two_objects
    large = {**LLAMA_8B, "weight_bytes": 140_000_000_000}
    assert plan(large).memory_bytes > base.memory_bytes
    assert plan(large).gpu_bytes - base.gpu_bytes == pytest.approx(124e9, rel=0.01)
    assert plan(large, engines__vllm__tensor_parallel=4).gpu_bytes < 0.3 * plan(large).gpu_bytes
    heavy = plan(LLAMA_8B, train__layers=8, train__sequence_tokens=16384)
    assert heavy.gpu_bytes > base.gpu_bytes, "the trainer is the widest"
    assert heavy.memory_bytes > base.memory_bytes


def test_a_gpu_round_wider_than_the_host_is_refused_and_a_right_one_passes() -> None:
    right, wide = config(LLAMA_8B), config(LLAMA_8B, train__sequence_tokens=1 << 20)
    free = {"rooms": ()}  # disk is not what this is about
    plan_gate(right, make_plan(RoundContext(right, Settings())).model_copy(update=free))
    with pytest.raises(GateError, match=r"of memory and 137 GB are free.*lower train\.sequence_tokens"):
        plan_gate(wide, make_plan(RoundContext(wide, Settings())).model_copy(update=free))


def test_memory_of_a_cpu_round_holds_two_copies_and_the_window() -> None:
    laptop = load_round(round_file("laptop"))
    shape = laptop.target.shape
    assert shape is not None
    found = make_plan(RoundContext(laptop, Settings()))
    assert found.gpu_bytes == 0
    assert found.memory_bytes == 2 * shape.weight_bytes + 4 * GIB + 3 * 64 * 512 * 4 * 576 * 2 + 2 * (64 << 20)


def step(found: Plan, name: str) -> float:
    return next(step.seconds for step in found.steps if step.step == name)


def test_several_answers_a_prompt_are_planned() -> None:
    """All are asked for; of a held-out prompt one is kept, so states and training grow a little less."""
    one, three = plan(SMOLLM2), plan(SMOLLM2, generate__further_temperatures=[1.0, 0.7])
    assert three.samples == pytest.approx((3 * 0.9 + 0.1) * one.samples, abs=1)
    assert three.prompt_tokens / three.samples == pytest.approx(one.prompt_tokens / one.samples, rel=0.01)
    start = one.rates.start_seconds
    assert step(three, "answers") - start == pytest.approx(3 * (step(one, "answers") - start), rel=0.01)
    assert step(three, "hidden") - start == pytest.approx(2.8 * (step(one, "hidden") - start), rel=0.01)
    assert step(three, "draft") - 20 == pytest.approx(3 * (step(one, "draft") - 20), rel=0.01)
    asked = {name: next(step.what for step in found.steps if step.step == "answers") for name, found in
             (("one", one), ("three", three))}  # fmt: skip
    assert asked == {"one": f"{one.samples} answers", "three": f"{3 * one.samples} answers"}
    assert three.disk_bytes > 2 * one.disk_bytes - sum(item.disk_bytes for item in one.steps if item.step != "hidden")


GOOD = {
    "prompts__count": 7000, "generate__expected_tokens": 129, "generate__further_temperatures": [1.0, 0.7, 1.0],
    "train__sequence_tokens": 2048, "train__epochs": 6, "train__layers": 2,
}  # fmt: skip


def advice(**overrides: Any) -> list[str]:
    return [note for note in plan(SMOLLM2, **overrides).notes if "measured on one H200" in note]


def test_a_round_like_the_best_one_is_advised_of_more_data_only() -> None:
    [said] = advice(**GOOD)
    assert said.startswith("twice the prompts (14,000) should add 0.11 at most")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train__epochs": 1}, r"undertrained: \d,\d\d\d optimiser steps.*raise train\.epochs to [34]"),
        ({"train__max_steps": 500}, "undertrained: 500 optimiser steps.*and lift train.max_steps"),
        ({"train__layers": 16}, r"undertrained: 0\.\d+ tokens for each of \d+M trained parameters"),
        ({"prompts__count": 500}, r"\(1,000\) should add 0\.41 or more"),
        ({"prompts__count": 2000}, r"\(4,000\) should add about 0\.24"),
        ({"prompts__count": 3000}, r"\(6,000\) should add about 0\.16"),
    ],
)
def test_a_plan_says_what_its_training_falls_short_of(changes: dict[str, Any], said: str) -> None:
    assert any(re.search(said, note) for note in advice(**{**GOOD, **changes}))


def test_a_training_that_goes_on_from_a_draft_is_not_called_undertrained() -> None:
    assert not any("undertrained" in note for note in advice(**GOOD, train__from="round:earlier", train__max_steps=9))


def test_samples_that_training_would_cut_are_told() -> None:
    cut = {"prepare__max_tokens": 1536, "generate__max_tokens": 1024}
    assert any(
        "up to 1,536 tokens, and training cuts" in note
        for note in plan(SMOLLM2, **cut, train__sequence_tokens=1024).notes
    )
    assert not any("training cuts" in note for note in plan(SMOLLM2, **cut, train__sequence_tokens=1536).notes)


@pytest.mark.parametrize(("name", "host"), [("small-gpu", 64 * GIB), ("round2", 1024 * GIB)])
def test_the_rounds_for_gpus_fit_and_are_trained_long_enough(
    name: str, host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.steps.plan.memory_available", lambda: host)
    shipped = load_round(round_file(name))
    found = make_plan(RoundContext(shipped, Settings())).model_copy(update={"rooms": ()})
    plan_gate(shipped, found)
    assert not any("optimiser steps" in note or "training cuts" in note for note in found.notes)
    hurried = build_round(shipped.model_dump(mode="json"), {"train.epochs": 1, "budget.disk_bytes": 10**9})
    short = make_plan(RoundContext(hurried, Settings())).model_copy(update={"rooms": ()})
    assert any("optimiser steps" in note for note in short.notes)
    with pytest.raises(GateError, match="its budget is"):
        plan_gate(hurried, short)


@pytest.mark.parametrize(
    ("gflops", "generate", "extract", "train", "serve"),
    [(40.0, 80, 229, 190, 31), (370.0, 281, 1301, 1024, 121)],
)
def test_cpus_are_planned_as_two_were_measured(
    monkeypatch: pytest.MonkeyPatch, gflops: float, generate: float, extract: float, train: float, serve: float
) -> None:
    monkeypatch.setattr(rates, "matrix_gflops", lambda: gflops)
    found = make_plan(RoundContext(load_round(round_file("laptop")), Settings())).rates
    assert found.generate_tokens == pytest.approx(generate, rel=0.1)
    assert found.extract_tokens == pytest.approx(extract, rel=0.1)
    assert found.train_tokens == pytest.approx(train, rel=0.1)
    assert found.serve_tokens == pytest.approx(serve, rel=0.1)


def test_the_smoke_round_is_sized_for_slow_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "matrix_gflops", lambda: 40.0)
    seconds = {name: make_plan(RoundContext(load_round(round_file(name)), Settings())).seconds for name in CPU_ROUNDS}
    assert seconds["smoke"] < 11.5 * 60, "set-up and the gates' own work come on top: 15 minutes in all"
    assert 50 * 60 < seconds["laptop"] < 80 * 60
