"""A target whose own files recommend a penalty answers as greedy as one without, in every kind of server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from standin.tiny_chat import make_target
from transformers import LlamaConfig, LlamaForCausalLM

from infra.config.round import EngineConfig, EngineName, TargetConfig
from infra.config.settings import Settings
from infra.engines.client.client import Client, Sampling
from infra.engines.registry import LaunchRequest, find_engine, start
from infra.targets.target import open_target

pytestmark = pytest.mark.timeout(1500)
NAME = "recommends-a-penalty"
VOCABULARY, CHARACTERS = 320, 94
PENALTY = 1.3
LENGTH = 24
PROMPTS = [[seed * 7 % 90, seed * 13 % 90, *range(seed, seed + 12)] for seed in range(1, 13)]
HOSTILE = {"do_sample": True, "temperature": 2.0, "top_k": 3, "repetition_penalty": PENALTY, "max_new_tokens": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The target in transformers: random, 64 wide heads; one of its likely tokens is made an end token."""
    folder = tmp_path_factory.mktemp("models") / NAME
    make_target(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=None,
        bos_token_id=None, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[CHARACTERS:] = 0.0
    model.save_pretrained(folder)
    stop = greedy(model, PROMPTS[0])[LENGTH // 2]
    model.generation_config.eos_token_id = [stop, VOCABULARY - 1]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, VOCABULARY - 1]} | HOSTILE))
    model.folder = folder
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other beside SGLang's servers, which never rest
    yield model
    torch.set_num_threads(threads)


def greedy(model: Any, prompt: list[int], penalty: float = 1.0, length: int = LENGTH) -> list[int]:
    made = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=length,
        do_sample=False,
        repetition_penalty=penalty,
        attention_mask=torch.ones(1, len(prompt)),
        pad_token_id=0,
    )
    return [int(token) for token in made[0, len(prompt) :]]


def sglang_greedy(model: Any, prompt: list[int], penalty: float) -> list[int]:
    """The likeliest tokens under a repetition penalty as SGLang counts it: each token up to the last end token.

    Read in 0.5.23: ``ScheduleBatch.cumulate_penalty_output_tokens`` and ``Scheduler.event_loop_overlap``. What the
    prompt says is not counted. A step is prepared while the one before it runs, so its own last token is not there
    yet: the prompt's last token is counted in its place at the first step, and each later token a step late.
    """
    said: list[int] = []
    for _ in range(LENGTH):
        with torch.no_grad():
            scores = model(torch.tensor([prompt + said])).logits[0, -1]
        counted = [prompt[-1], *said[:-1]] if said else []
        repeated = scores[counted]
        scores[counted] = torch.where(repeated < 0, repeated * penalty, repeated / penalty)
        said.append(int(scores.argmax()))
        if said[-1] in model.generation_config.eos_token_id:
            break
    return said


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> EngineName:
    name: EngineName = request.param
    return name


@pytest.fixture(scope="module")
def asked(engine: EngineName, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Client]]:
    """Clients of a server that generates and of one that extracts."""
    settings = Settings(state_dir=tmp_path_factory.mktemp("state"), models_path=model.folder.parent)
    target = open_target(TargetConfig(name=NAME), settings.models_dir)
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=128, ready_seconds=600)
    staging = tmp_path_factory.mktemp("staging")
    states = LaunchRequest(target, config, "extract", taps=(1, 2, 3), staging=staging, concurrency=4)
    dialect = find_engine(engine).dialect
    with start(engine, LaunchRequest(target, config, "generate", concurrency=4), settings) as first:
        first.wait_ready()
        with start(engine, states, settings) as second:
            second.wait_ready()
            with (
                Client(first.base_url, dialect=dialect) as generates,
                Client(second.base_url, dialect=dialect) as gives,
            ):
                yield {"generates": generates, "extracts": gives}


def test_answers_are_greedy_and_end_where_the_targets_files_say(asked: dict[str, Client], model: Any) -> None:
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert sum(made != greedy(model, prompt, PENALTY) for made, prompt in zip(expected, PROMPTS, strict=True)) > 6
    answers = [asked["generates"].generate(prompt, Sampling(LENGTH)) for prompt in PROMPTS]
    assert [answer.token_ids for answer in answers] == expected
    assert answers[0].finish_reason == "stop"
    assert [asked["generates"].stream(prompt, Sampling(LENGTH)).token_ids for prompt in PROMPTS] == expected


def test_a_penalty_that_the_round_wants_is_applied(asked: dict[str, Client], engine: EngineName, model: Any) -> None:
    """vLLM's is that of transformers, SGLang's its own; both change what most prompts are answered."""
    penalised = {"vllm": greedy, "sglang": sglang_greedy}[engine]
    expected = [penalised(model, prompt, PENALTY) for prompt in PROMPTS]
    assert sum(made != greedy(model, prompt) for made, prompt in zip(expected, PROMPTS, strict=True)) > 6
    sampling = Sampling(LENGTH, repetition_penalty=PENALTY)
    assert [asked["generates"].generate(prompt, sampling).token_ids for prompt in PROMPTS] == expected


def test_the_token_after_extracted_states_is_the_likeliest(asked: dict[str, Client], model: Any) -> None:
    """What the capture gate compares: sequences are chosen in which a penalty would change it."""
    expected, changed = [], 0
    for prompt in (prompt + greedy(model, prompt, length=10) for prompt in PROMPTS):
        expected.append((prompt, greedy(model, prompt, length=1)[0]))
        changed += greedy(model, prompt, PENALTY, length=1)[0] != expected[-1][1]
    assert changed > 2
    assert [asked["extracts"].extract(prompt).next_token for prompt, _ in expected] == [token for _, token in expected]
