"""A step's key changes with its own inputs and with those of the steps before it, and with nothing else."""

from dataclasses import replace
from typing import Any

import pytest

from infra.config.keys import decisive
from infra.config.load import build_round, load_round, round_file
from infra.config.round import EvaluateConfig, GenerateConfig
from infra.round.keys import Inputs, StepKeys, step_keys

INPUTS = Inputs("revision", "prompts", "evaluation", {"vllm": "0.32.0", "speculators": "0.9.0"})
STEPS = ("answers", "samples", "hidden", "draft", "eval", "published", "report")


def keys(overrides: dict[str, Any] | None = None, inputs: Inputs = INPUTS) -> StepKeys:
    raw = load_round(round_file("smoke")).model_dump(mode="json")
    return step_keys(build_round(raw, overrides), inputs)


def changed(one: StepKeys, other: StepKeys) -> tuple[str, ...]:
    return tuple(name for (name, a), (_, b) in zip(one.items(), other.items(), strict=True) if a != b)


@pytest.mark.parametrize(
    ("override", "first"),
    [
        ({"generate.max_tokens": 64}, "answers"),
        ({"prompts.template_args": {"enable_thinking": False}}, "answers"),
        ({"generate.repetition_penalty": 1.1}, "answers"),
        ({"generate.further_temperatures": [1.0]}, "answers"),
        ({"evaluate.temperature": 0.7, "evaluate.top_k": 20}, "eval"),
        ({"prepare.heldout": 0.2}, "samples"),
        ({"extract.taps": [3, 15, 27]}, "hidden"),
        ({"extract.shard_bytes": 1 << 20}, "hidden"),
        ({"train.epochs": 2}, "draft"),
        ({"train.devices": 8}, "draft"),
        ({"engines.vllm.ladder": [{"name": "graphs", "flags": []}]}, "eval"),
        ({"evaluate.max_tokens": 64}, "eval"),
    ],
)
def test_a_changed_input_redoes_what_depends_on_it(override: dict[str, Any], first: str) -> None:
    assert changed(keys(), keys(override)) == STEPS[STEPS.index(first) :]


def test_sampling_values_that_came_later_are_in_no_key_at_their_default() -> None:
    """Rounds that are done did not know them, and did what the defaults say."""
    generate, evaluate = decisive(GenerateConfig()), decisive(EvaluateConfig())
    assert {"temperature", "top_p"} < set(generate)
    assert "temperature" in evaluate
    later = {"further_temperatures", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    assert not later & set(generate)
    assert not (later | {"top_p"}) & set(evaluate)
    assert decisive(GenerateConfig(presence_penalty=1.5))["presence_penalty"] == 1.5


@pytest.mark.parametrize(
    "override",
    [
        {"generate.concurrency": 3},
        {"extract.concurrency": 3},
        {"generate.max_empty": 0.5},
        {"engines.vllm.ready_seconds": 5},
        {"description": "another"},
        {"prompts.source": "/elsewhere/the-same.jsonl"},
        {"evaluate.prompts.source": "/elsewhere/the-same.jsonl"},
        {"train.from": "/elsewhere/the-same-draft"},
        {"retention.states": "keep"},
        {"budget.hours": 9},
    ],
)
def test_knobs_change_no_key(override: dict[str, Any]) -> None:
    assert changed(keys(), keys(override)) == ()


@pytest.mark.parametrize(
    ("inputs", "first"),
    [
        (replace(INPUTS, target_revision="other"), "answers"),
        (replace(INPUTS, prompts="other"), "answers"),
        (replace(INPUTS, versions={"vllm": "0.33.0", "speculators": "0.9.0"}), "hidden"),
        (replace(INPUTS, versions={"vllm": "0.32.0", "speculators": "1.0.0"}), "draft"),
        (replace(INPUTS, start="digest"), "draft"),
        (replace(INPUTS, evaluation_prompts="other"), "eval"),
    ],
)
def test_target_engine_and_prompts_enter_where_they_matter(inputs: Inputs, first: str) -> None:
    assert changed(keys(), keys(inputs=inputs)) == STEPS[STEPS.index(first) :]


def test_pinned_samples_stay_and_the_states_follow_the_target() -> None:
    pinned = replace(INPUTS, samples=keys().samples)
    assert keys(inputs=pinned).hidden == keys().hidden
    moved = keys(inputs=replace(pinned, target_revision="other"))
    assert moved.samples == keys().samples
    assert moved.hidden != keys().hidden
