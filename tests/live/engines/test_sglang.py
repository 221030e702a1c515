"""The SGLang engine, really run on CPU with the small target: answers, template, measuring, generating, its end."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest
from standin.heard import hearing
from standin.processes import running

from infra.config.load import load_round, round_file
from infra.config.round import EngineConfig, RungConfig
from infra.config.settings import Settings
from infra.data.history import CUT
from infra.data.template import Chat
from infra.engines.client.bench import run, summary
from infra.engines.client.client import Client, RequestRefused, Sampling
from infra.engines.client.flights import Flights
from infra.engines.registry import LaunchRequest, Server, engine_version, find_engine, start
from infra.machine.processes.guarded import recorded
from infra.round.context import RoundContext
from infra.steps.generate import Asking, answers_wanted, generate
from infra.store.answers import read_answers
from infra.targets.target import Target

pytestmark = pytest.mark.timeout(900)

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONGEST = 512
NEAR_TIE = 1e-3
"""Difference of log probabilities, in nats, at which another batch may pick the other token."""


@pytest.fixture(scope="module")
def server(sglang_environment: Path, settings: Settings, target: Target) -> Iterator[Server]:
    """A server whose first rung cannot work."""
    ladder = (RungConfig(name="impossible", flags=("--no-such-flag",)), RungConfig(name="plain"))
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=LONGEST, ready_seconds=900, ladder=ladder)
    with start("sglang", LaunchRequest(target, config, "bench", concurrency=8), settings) as serving:
        phases: list[str] = []
        with hearing("infra", lambda record: phases.append(record.getMessage())):
            serving.wait_ready()
        assert any(phase.endswith(": answering") for phase in phases), phases
        yield serving


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.base_url, dialect=find_engine("sglang").dialect) as talking:
        yield talking


def test_a_wrong_flag_is_said_in_one_sentence_and_the_next_rung_is_taken(server: Server) -> None:
    assert server.rung == "plain"
    [(name, reason)] = server.failed_rungs
    assert name == "impossible"
    assert "flags --no-such-flag" in reason
    assert "\n" not in reason
    server.check()


def test_the_served_version_is_the_one_in_the_environments_metadata(server: Server, settings: Settings) -> None:
    assert server.version == engine_version("sglang", "cpu", settings)


def test_answers_come_as_token_ids_with_the_end_token(client: Client) -> None:
    prompt = client.tokenize_chat(QUESTION)
    answer = client.generate(prompt, Sampling(max_tokens=24))
    assert answer.prompt_ids == prompt
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == 2
    cut = client.generate(prompt, Sampling(max_tokens=2))
    assert cut.finish_reason == "length"
    assert cut.token_ids == answer.token_ids[:2]


def test_answers_are_what_the_engines_own_log_probabilities_say(server: Server, client: Client) -> None:
    prompt = client.tokenize_chat(QUESTION)
    answer = client.generate(prompt, Sampling(max_tokens=24))
    for done, token in enumerate(answer.token_ids):
        best = best_tokens(server, [*prompt, *answer.token_ids[:done]])
        assert token in [candidate for score, candidate in best if score > best[0][0] - NEAR_TIE], (done, token, best)


def best_tokens(server: Server, tokens: Sequence[int]) -> list[tuple[float, int]]:
    """The likeliest tokens after a prompt of its own, with their log probabilities, the best first."""
    asked = {"input_ids": list(tokens), "return_logprob": True, "top_logprobs_num": 3}
    sampling = {"sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    reply = httpx.post(f"{server.base_url}/generate", json=asked | sampling, timeout=300, trust_env=False)
    return [(entry[0], entry[1]) for entry in reply.json()["meta_info"]["output_top_logprobs"][0]]


def test_the_engine_renders_conversations_as_the_targets_template_does(client: Client, target: Target) -> None:
    chat = Chat(target)
    talks = [
        QUESTION,
        [{"role": "system", "content": "Be brief."}, *QUESTION],
        [*QUESTION, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "  And of Perú? 🙂\n"}],
    ]
    for messages in talks:
        assert client.tokenize_chat(messages) == chat.render(messages, {}, add_generation_prompt=True)


def test_prompts_and_answers_fill_the_whole_length_and_no_more(client: Client) -> None:
    assert len(client.generate([1] * (LONGEST - 1), Sampling(max_tokens=1)).token_ids) == 1
    full = client.generate([1, 504] * 250, Sampling(max_tokens=LONGEST - 500))
    assert full.finish_reason == "stop" or len(full.token_ids) == LONGEST - 500
    with pytest.raises(RequestRefused, match="context length"):
        client.generate([1] * (LONGEST + 100), Sampling(max_tokens=4))
    assert client.generate([1, 504], Sampling(max_tokens=1)).token_ids


def test_a_run_without_a_draft_is_measured(client: Client) -> None:
    prompts = [client.tokenize_chat([{"role": "user", "content": f"Count to {number}."}]) for number in range(3, 9)]
    measured = summary([run(client, prompts, sampling=Sampling(12), concurrency=3)])
    assert measured.counters is None
    assert measured.output_tokens == sum(map(len, measured.answers)) > len(prompts)
    assert 0 < measured.ttft_p50 <= measured.ttft_p95 < measured.seconds
    assert 0 < measured.itl_p50 <= measured.itl_p95 < measured.seconds


def test_the_generate_step_asks_sglang_as_it_asks_vllm(client: Client, settings: Settings) -> None:
    changes = {"serve_with": "sglang", "prompts.count": 6, "generate.max_tokens": 24, "generate.concurrency": 4}
    context = RoundContext(load_round(round_file("smoke-sglang"), changes), settings)
    generate(context, Asking(client, Flights()))
    answers = read_answers(context.store, context.prefix("answers"))
    assert len(answers) == answers_wanted(context) >= 6
    for answer in answers.values():
        if answer.finish_reason == CUT:
            continue  # a later turn of a conversation that ended
        assert answer.status == "ok"
        assert (answer.answer_ids[-1] in context.chat.eos_ids) == (answer.finish_reason == "stop")
        assert answer.finish_reason == "stop" or len(answer.answer_ids) == 24
        assert answer.engine == f"sglang {context.versions['sglang']}"


def test_stopping_leaves_no_process(server: Server, settings: Settings) -> None:
    trees = [psutil.Process(record.child_pid) for record in recorded(settings.run_dir) if record.alive]
    assert len(trees) == 1
    processes = [trees[0], *trees[0].children(recursive=True)]
    assert len(processes) > 2
    server.stop()
    assert not [process for process in processes if running(process)]
    assert not [record for record in recorded(settings.run_dir) if record.alive and record.owner_pid == os.getpid()]
