"""The vLLM engine, really run on CPU with the small target: answers, hidden states, measuring, stopping."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from standin.processes import running
from transformers import AutoModelForCausalLM

from infra.config.round import EngineConfig, RungConfig
from infra.config.settings import Settings
from infra.engines.client.bench import run, summary
from infra.engines.client.client import Client, RequestRefused, Sampling
from infra.engines.client.extraction import States
from infra.engines.registry import LaunchRequest, Server, engine_version, start
from infra.engines.vllm.dialect import VllmDialect
from infra.machine.processes.guarded import recorded
from infra.round.serving import Serving
from infra.targets.target import Target

pytestmark = pytest.mark.timeout(900)

SENTENCE = (
    "The quick brown fox jumps over the lazy dog while seven wizards mix a jug of quartz, and nobody asks why. " * 8
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(vllm: Serving, settings: Settings, target: Target) -> Iterator[Server]:
    """A second server beside the shared one; its first rung cannot work."""
    ladder = (RungConfig(name="impossible", flags=("--no-such-flag",)), RungConfig(name="plain"))
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=512, ready_seconds=600, ladder=ladder)
    with start("vllm", LaunchRequest(target, config, "bench", concurrency=8), settings) as second:
        second.wait_ready()
        assert any("impossible" in event.text for event in second.events), second.events
        yield second


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.base_url, VllmDialect()) as talking:
        yield talking


def test_a_rung_that_cannot_work_is_followed_by_the_next_and_the_reason_is_kept(server: Server) -> None:
    assert server.rung == "plain"
    [(name, reason)] = server.failed_rungs
    assert name == "impossible"
    assert "--no-such-flag" in reason
    server.check()


def test_the_served_version_is_the_one_in_the_environments_metadata(server: Server, settings: Settings) -> None:
    assert server.version == engine_version("vllm", "cpu", settings)


def test_answers_come_as_token_ids_with_the_end_token(client: Client) -> None:
    prompt = client.tokenize_chat(QUESTION)
    answer = client.generate(prompt, Sampling(max_tokens=24))
    assert answer.prompt_ids == prompt
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == 2
    cut = client.generate(prompt, Sampling(max_tokens=2))
    assert cut.finish_reason == "length"
    assert cut.token_ids == answer.token_ids[:2]


def test_a_prompt_that_does_not_fit_is_refused_and_the_server_goes_on(client: Client) -> None:
    with pytest.raises(RequestRefused, match="512"):
        client.generate([1] * 600, Sampling(max_tokens=4))
    assert client.generate([1, 504], Sampling(max_tokens=1)).token_ids


def test_a_run_without_a_draft_is_measured(client: Client) -> None:
    prompts = [client.tokenize_chat([{"role": "user", "content": f"Count to {number}."}]) for number in range(3, 9)]
    measured = summary([run(client, prompts, sampling=Sampling(12), concurrency=3)])
    assert measured.counters is None
    assert measured.output_tokens == sum(map(len, measured.answers)) > len(prompts)
    assert measured.tokens_per_second > 0
    assert 0 < measured.ttft_p50 <= measured.ttft_p95 < measured.seconds
    assert 0 < measured.itl_p50 <= measured.itl_p95 < measured.seconds


def test_states_equal_the_references_at_every_tap(vllm: Serving, client: Client, target: Target) -> None:
    text = client.tokenize_chat([{"role": "user", "content": SENTENCE}])
    sequences = [text[:length] for length in (1, 7, 33, 64, 129, 200)]
    with ThreadPoolExecutor(len(sequences)) as threads:
        states = list(threads.map(vllm.extractor(600).extract, sequences))
    assert list(vllm.staging.iterdir()) == []
    reference = Reference(target)
    for sequence, found in zip(sequences, states, strict=True):
        assert found.token_ids.tolist() == sequence
        layers = reference.layers(sequence)
        for slot, tap in enumerate((*vllm.context.config.extract.taps, target.shape.layers)):
            error = median_error(found, slot, layers[tap])
            neighbours = [median_error(found, slot, layers[near]) for near in (tap - 1, tap + 1) if near < len(layers)]
            assert error < 0.08, (tap, len(sequence), error)
            # The first position's state is so large that a layer in the middle changes it by a thousandth, which is
            # less than bfloat16 rounds it: alone it is right at the neighbouring taps too.
            if len(sequence) > 1:
                assert error < 0.5 * min(neighbours), (tap, len(sequence), error, neighbours)


def test_stopping_leaves_no_process(server: Server, settings: Settings) -> None:
    [tree] = [psutil.Process(record.child_pid) for record in recorded(settings.run_dir) if record.alive]
    processes = [tree, *tree.children(recursive=True)]
    assert len(processes) > 1
    server.stop()
    assert not [process for process in processes if running(process)]
    assert not [record for record in recorded(settings.run_dir) if record.alive and record.owner_pid == os.getpid()]


class Reference:
    """The residual stream of transformers in fp32: index k enters layer k; the last one is before the final norm."""

    def __init__(self, target: Target) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)

    def layers(self, token_ids: Sequence[int]) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []

        def keep(
            module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor | tuple[torch.Tensor, ...]
        ) -> None:
            outputs.append(output[0] if isinstance(output, tuple) else output)

        hook = self._model.model.layers[-1].register_forward_hook(keep)
        with torch.inference_mode():
            hidden = self._model(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
        hook.remove()
        return [*(layer[0] for layer in hidden[:-1]), outputs[0][0]]


def median_error(states: States, slot: int, expected: torch.Tensor) -> float:
    """Median over the tokens of the relative error of one slot."""
    found = states.hidden_states[:, slot].float()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
