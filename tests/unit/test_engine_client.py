"""Client, extractor, measuring and server supervision against a stand-in that speaks the engine's protocol."""

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from standin.answering import AnsweringEngine, Reply, answering, completion, pieces
from standin.waiting import wait_for

from infra.config.round import GenerateConfig
from infra.engines.client.bench import looping, percentile, run, summary, warm_up
from infra.engines.client.client import Client, EngineSilent, RequestRefused, Sampling
from infra.engines.client.counters import SpecCounters, parse_token_total
from infra.engines.client.extraction import ExtractionFault, Extractor
from infra.engines.vllm.counters import parse_spec_counters
from infra.engines.vllm.dialect import VllmDialect
from infra.errors import EngineError


@pytest.fixture
def engine() -> Iterator[AnsweringEngine]:
    with answering() as server:
        yield server


@pytest.fixture
def client(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr("infra.engines.client.client.BACKOFF_SECONDS", 0.001)
    with Client(engine.url, VllmDialect(), timeout=10) as talking:
        yield talking


def test_an_answer_is_token_ids_and_every_sampling_value_is_named(engine: AnsweringEngine, client: Client) -> None:
    answer = client.generate([1, 2, 3], Sampling(max_tokens=9, temperature=0.5, top_p=0.9, seed=4))
    assert (answer.token_ids, answer.finish_reason, answer.prompt_ids) == ([7, 8, 2], "stop", [1, 2, 3])
    [sent] = engine.requests
    assert sent["prompt"] == [1, 2, 3]
    assert (sent["max_tokens"], sent["temperature"], sent["top_p"], sent["seed"]) == (9, 0.5, 0.9, 4)
    assert (sent["top_k"], sent["min_p"], sent["repetition_penalty"], sent["return_token_ids"]) == (0, 0.0, 1.0, True)
    assert (sent["presence_penalty"], sent["frequency_penalty"]) == (0.0, 0.0)


def test_a_request_for_states_names_every_sampling_value_too(engine: AnsweringEngine, client: Client) -> None:
    """The capture gate compares the token that follows: a penalty of the target's own would change it."""
    engine.answer = lambda payload: (200, completion(payload) | {"kv_transfer_params": {"hidden_states_path": "/s"}})
    client.extract([1, 2, 3])
    [sent] = engine.requests
    neutral = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert sent.items() >= (neutral | {"max_tokens": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0}).items()


def test_what_the_round_says_of_sampling_reaches_the_engine(engine: AnsweringEngine, client: Client) -> None:
    said = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    said |= {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    client.generate([1], Sampling.of(GenerateConfig.model_validate(said), max_tokens=3, seed=5))
    assert engine.requests[0].items() >= (said | {"max_tokens": 3, "seed": 5}).items()


@pytest.mark.parametrize("choice", [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": None}, {"token_ids": None}])
def test_an_answer_to_another_prompt_or_without_ids_is_an_error(
    engine: AnsweringEngine, client: Client, choice: dict[str, Any]
) -> None:
    engine.answer = lambda payload: (200, completion(payload, choice=choice))
    with pytest.raises(EngineError, match="token"):
        client.generate([1, 2, 3], Sampling(max_tokens=3))


def test_a_refused_request_is_told_apart_and_not_retried(engine: AnsweringEngine, client: Client) -> None:
    engine.answer = lambda payload: (400, {"error": {"message": "maximum context length is 512"}})
    with pytest.raises(RequestRefused, match="maximum context length is 512"):
        client.generate([1], Sampling(max_tokens=3))
    assert len(engine.requests) == 1


@pytest.mark.parametrize("trouble", [500, 503, 429, 0])
def test_passing_trouble_is_retried(engine: AnsweringEngine, client: Client, trouble: int) -> None:
    engine.answer = lambda payload: (trouble, {}) if len(engine.requests) < 3 else (200, completion(payload))
    assert client.generate([1], Sampling(max_tokens=3)).token_ids == [7, 8, 2]
    assert len(engine.requests) == 3


@pytest.mark.parametrize("trouble", [500, 0])
def test_lasting_trouble_ends_in_an_engine_error_after_few_tries(
    engine: AnsweringEngine, client: Client, trouble: int
) -> None:
    engine.answer = lambda payload: (trouble, {"error": {"message": "EngineCore died"}})
    with pytest.raises(EngineError) as caught:
        client.generate([1], Sampling(max_tokens=3))
    assert not isinstance(caught.value, RequestRefused)
    assert len(engine.requests) == 4


def test_closing_the_client_ends_requests_in_flight_at_once(engine: AnsweringEngine) -> None:
    client = Client(engine.url, VllmDialect(), timeout=600)
    # It answers after the test.
    engine.answer = lambda payload: (200, completion(payload)) if engine.release.wait() else (500, {})
    faults: list[Exception] = []

    def ask() -> None:
        try:
            client.generate([1], Sampling(max_tokens=3))
        except EngineError as error:
            faults.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(engine.requests) == 4, "all requests are in flight")
    client.close()
    for thread in threads:
        thread.join(60)
    assert len(faults) == 4, "all have ended, and no answer has come"
    assert all("closed" in str(fault) for fault in faults)
    with pytest.raises(EngineError, match="closed"):
        client.generate([1], Sampling(max_tokens=3))


def test_a_piece_of_several_tokens_counts_as_as_many_gaps(engine: AnsweringEngine, client: Client) -> None:
    begin = time.perf_counter()
    timed = client.stream([1, 2], Sampling(max_tokens=5))
    took = time.perf_counter() - begin
    assert timed.token_ids == [5, 6, 7, 8, 2]
    gaps = [seconds for _, seconds in timed.gaps]
    assert len(gaps) == 4
    assert gaps[0] == gaps[1] == gaps[2]
    assert 0 < timed.first_token_seconds + sum(gaps) <= took


def test_a_stream_that_breaks_off_is_an_error(engine: AnsweringEngine, client: Client) -> None:
    engine.stream = lambda payload: iter(list(pieces(payload))[:2])
    with pytest.raises(EngineError, match="ended after 4 tokens"):
        client.stream([1, 2], Sampling(max_tokens=5))
    engine.stream = lambda payload: iter([*list(pieces(payload))[:1], {"error": {"message": "EngineCore died"}}])
    with pytest.raises(EngineError, match="EngineCore died"):
        client.stream([1, 2], Sampling(max_tokens=5))


@pytest.mark.parametrize(("waits_for", "tries"), [("connect", 4), ("getresponse", 1)])
def test_a_server_that_takes_no_connection_is_tried_again_and_one_that_is_silent_is_not(
    waits_for: str, tries: int, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[HTTPConnection] = []

    def time_out(connection: HTTPConnection) -> None:
        asked.append(connection)
        raise TimeoutError("timed out")

    monkeypatch.setattr(HTTPConnection, waits_for, time_out)
    with pytest.raises(EngineError) as raised:
        client.generate([1], Sampling(max_tokens=1))
    assert len(asked) == tries
    assert isinstance(raised.value, EngineSilent) == (waits_for == "getresponse")
    if waits_for == "connect":
        assert "cannot be reached: timed out." in str(raised.value)


def test_connections_are_kept_and_one_that_the_server_ended_is_not_used_again(
    engine: AnsweringEngine, client: Client
) -> None:
    for _ in range(3):
        client.generate([1], Sampling(max_tokens=3))
    assert engine.connections == 1
    engine.hang_up()
    client.generate([1], Sampling(max_tokens=3))
    assert engine.connections == 2
    assert len(engine.requests) == 4, "none was sent into a dead connection"


METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
"""


def test_counters_are_summed_over_engines_and_subtract() -> None:
    counters = parse_spec_counters(METRICS)
    assert counters == SpecCounters(12, 30, 9, (5, 3, 1))
    grown = SpecCounters(22, 60, 24, (13, 7, 4)) - counters
    assert grown == SpecCounters(10, 30, 15, (8, 4, 3))
    assert parse_spec_counters("vllm:num_requests_running 1.0\n") is None


def test_measuring_keeps_the_order_and_sums_runs_up(engine: AnsweringEngine, client: Client) -> None:
    engine.metrics = METRICS
    warm_up(client, [[1]], concurrency=1)
    runs = [run(client, part, sampling=Sampling(5), concurrency=2) for part in ([[1], [2]], [[3]])]
    measured = summary(runs)
    assert measured.output_tokens == 15
    assert measured.answers == [[5, 6, 7, 8, 2]] * 3
    assert measured.counters == SpecCounters(0, 0, 0, (0, 0, 0))
    assert measured.seconds == runs[0].seconds + runs[1].seconds
    assert sorted(sent["prompt"] for sent in engine.requests) == [[1], [1], [2], [3]]


def test_percentiles_are_by_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile([3.0], 0.95)) == (50.0, 95.0, 3.0)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([9] * 40, True),
        (list(range(50)) + [1, 2, 3] * 10, True),
        (list(range(20)) * 4, True),
        (list(range(200)), False),
        ([1, 2, 3] * 10 + list(range(50, 70)), False),
        ([5] * 8, False),
        ([], False),
    ],
)
def test_looping_answers_are_recognised(answer: list[int], expected: bool) -> None:
    assert looping(answer) is expected


TOKENS = [4, 5, 6]


def write_states(file: Path, hidden: torch.Tensor | None = None, ids: list[int] | None = None) -> None:
    states = torch.ones(3, 3, 8, dtype=torch.bfloat16) if hidden is None else hidden
    save_file({"hidden_states": states, "token_ids": torch.tensor(ids or TOKENS)}, file)
    file.with_name(file.name + ".lock").touch()


def naming(path: Path) -> Callable[[dict[str, Any]], Reply]:
    return lambda payload: (200, completion(payload, kv_transfer_params={"hidden_states_path": str(path)}))


def test_states_are_read_checked_and_their_file_removed(
    engine: AnsweringEngine, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "a.safetensors"
    write_states(file)
    engine.answer = naming(file)
    states = Extractor(client, tmp_path, (1, 2), 8).extract(TOKENS)
    assert states.hidden_states.shape == (3, 3, 8)
    assert states.hidden_states.dtype == torch.bfloat16
    assert states.token_ids.tolist() == TOKENS
    assert list(tmp_path.iterdir()) == []


def test_states_are_waited_for_until_the_engine_lets_go_of_the_lock(
    engine: AnsweringEngine, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "a.safetensors"
    engine.answer = naming(file)
    with file.with_name(file.name + ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ExtractionFault, match="not written within"):
            Extractor(client, tmp_path, (1, 2), 8, timeout=0.05).extract(TOKENS)
    lock = file.with_name(file.name + ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def finish() -> None:
        wait_for(lambda: len(engine.requests) == 2, "the states are asked for")
        write_states(file)
        lock.close()

    threading.Thread(target=finish, daemon=True).start()
    assert Extractor(client, tmp_path, (1, 2), 8, timeout=10).extract(TOKENS).token_ids.tolist() == TOKENS


def bad(value: float) -> torch.Tensor:
    states = torch.ones(3, 3, 8, dtype=torch.bfloat16)
    states[1, 2] = value
    return states


@pytest.mark.parametrize(
    ("hidden", "ids", "words"),
    [
        (torch.ones(2, 3, 8, dtype=torch.bfloat16), None, r"\[2, 3, 8\]"),
        (torch.ones(3, 2, 8, dtype=torch.bfloat16), None, r"\[3, 2, 8\]"),
        (torch.ones(3, 3, 8, dtype=torch.int32), None, "int32"),
        (None, [4, 5, 7], "other tokens"),
        (bad(float("nan")), None, "NaN"),
        (bad(float("inf")), None, "NaN or Inf"),
        (bad(0.0), None, "only zeros for 1"),
    ],
)
def test_states_that_must_not_be_used_are_refused_and_removed(
    engine: AnsweringEngine,
    client: Client,
    tmp_path: Path,
    hidden: torch.Tensor | None,
    ids: list[int] | None,
    words: str,
) -> None:
    write_states(tmp_path / "a.safetensors", hidden, ids)
    engine.answer = naming(tmp_path / "a.safetensors")
    with pytest.raises(ExtractionFault, match=words):
        Extractor(client, tmp_path, (1, 2), 8).extract(TOKENS)
    assert list(tmp_path.iterdir()) == []


def test_float32_states_are_rounded(engine: AnsweringEngine, client: Client, tmp_path: Path) -> None:
    write_states(tmp_path / "a.safetensors", torch.full((3, 3, 8), 1.00001))
    engine.answer = naming(tmp_path / "a.safetensors")
    states = Extractor(client, tmp_path, (1, 2), 8).extract(TOKENS)
    assert states.hidden_states.dtype == torch.bfloat16
    assert bool((states.hidden_states == 1).all())


def test_a_half_written_file_and_a_missing_one_are_faults(
    engine: AnsweringEngine, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "a.safetensors"
    write_states(file)
    file.write_bytes(file.read_bytes()[:-10])
    engine.answer = naming(file)
    extractor = Extractor(client, tmp_path, (1, 2), 8)
    with pytest.raises(ExtractionFault, match="cannot be read"):
        extractor.extract(TOKENS)
    with pytest.raises(ExtractionFault, match="no lock file"):
        extractor.extract(TOKENS)
    lock = file.with_name(file.name + ".lock")
    for make in (lock.touch, partial(os.mkfifo, lock)):
        make()
        with pytest.raises(ExtractionFault, match="did not write"):
            extractor.extract(TOKENS)
    engine.answer = lambda payload: (200, completion(payload))
    with pytest.raises(ExtractionFault, match="without a path"):
        extractor.extract(TOKENS)


def test_a_path_outside_staging_is_neither_read_nor_removed(
    engine: AnsweringEngine, client: Client, tmp_path: Path
) -> None:
    staging, elsewhere = tmp_path / "staging", tmp_path / "elsewhere"
    staging.mkdir()
    elsewhere.mkdir()
    file = elsewhere / "a.safetensors"
    write_states(file)
    (staging / "link.safetensors").symlink_to(file)
    (staging / "link.safetensors.lock").touch()
    for path in (file, staging / ".." / "elsewhere" / "a.safetensors", staging / "link.safetensors"):
        engine.answer = naming(path)
        with pytest.raises(ExtractionFault, match="as its file of states"):
            Extractor(client, staging, (1, 2), 8).extract(TOKENS)
    assert file.is_file()


LIES = {
    "no object": ["x"],
    "choices of words": {"choices": ["x"]},
    "a choice by name": {"choices": {"a": 1}},
    "no finish reason": {"choices": [{"prompt_token_ids": [1, 2], "token_ids": [3]}]},
    "tokens that are words": {"choices": [{"prompt_token_ids": [1, 2], "token_ids": ["x"], "finish_reason": "stop"}]},
    "tokens that are none": {"choices": [{"prompt_token_ids": [1, 2], "token_ids": [None], "finish_reason": "stop"}]},
    "negative tokens": {"choices": [{"prompt_token_ids": [1, 2], "token_ids": [-1], "finish_reason": "stop"}]},
    "more than was asked": {
        "choices": [{"prompt_token_ids": [1, 2], "token_ids": [5] * 9, "finish_reason": "length"}],
        "kv_transfer_params": ["x"],
    },
    "no token at all": {"choices": [{"prompt_token_ids": [1, 2], "token_ids": []}]},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_answer_of_another_shape_is_the_engines_fault(
    lie: Any, engine: AnsweringEngine, client: Client, tmp_path: Path
) -> None:
    engine.answer = lambda payload: (200, lie)
    engine.stream = lambda payload: iter([lie])
    for ask in (
        lambda: client.generate([1, 2], Sampling(max_tokens=4)),
        lambda: client.extract([1, 2]),
        lambda: (
            client.stream([1, 2], Sampling(max_tokens=4))
            if lie != LIES["more than was asked"]
            else client.extract([1, 2])
        ),
        lambda: client.tokenize_chat([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(EngineError, match="engine|answer"):
            ask()


def test_counters_that_are_no_numbers_are_not_read(engine: AnsweringEngine, client: Client) -> None:
    name = "vllm:spec_decode_num_"
    engine.metrics = f"{name}drafts_total{{}} 1.2.3\nvllm:generation_tokens_total 1e.5\n"
    assert client.spec_counters() is None
    assert parse_token_total(engine.metrics) is None
    engine.metrics = f"{name}drafts_total{{}} 1e999\n"
    with pytest.raises(EngineError, match="/metrics answered in a shape"):
        client.spec_counters()


def test_a_refusal_of_another_shape_is_a_refusal(engine: AnsweringEngine, client: Client) -> None:
    engine.answer = lambda payload: (400, ["no"])
    with pytest.raises(RequestRefused, match="no"):
        client.generate([1], Sampling(max_tokens=1))


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000 + ".safetensors", "loop.safetensors", "", "folder.safetensors"])
def test_a_name_that_no_file_can_have_is_a_fault(
    name: str, engine: AnsweringEngine, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "folder.safetensors.lock").write_text("")
    engine.answer = lambda payload: (
        200,
        completion(payload, kv_transfer_params={"hidden_states_path": f"{tmp_path}/{name}"}),
    )
    with pytest.raises(ExtractionFault):
        Extractor(client, tmp_path, (1, 2), 4).extract([1, 2, 3])


def test_a_link_out_of_staging_is_neither_read_nor_removed(
    engine: AnsweringEngine, client: Client, tmp_path: Path
) -> None:
    staging, outside = tmp_path / "staging", tmp_path / "outside.safetensors"
    staging.mkdir()
    outside.write_text("mine")
    (staging / "x.safetensors").symlink_to(outside)
    (staging / "x.safetensors.lock").write_text("")
    engine.answer = lambda payload: (
        200,
        completion(payload, kv_transfer_params={"hidden_states_path": f"{staging}/x.safetensors"}),
    )
    with pytest.raises(ExtractionFault, match="named"):
        Extractor(client, staging, (1, 2), 4).extract([1, 2, 3])
    assert outside.read_text() == "mine"


def test_a_file_far_too_large_is_not_read(engine: AnsweringEngine, client: Client, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    header = json.dumps({"hidden_states": {"dtype": "BF16", "shape": [1 << 37], "data_offsets": [0, 1 << 38]}}).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + (1 << 38))  # it takes no room: nothing is written there
    (tmp_path / "x.safetensors.lock").write_text("")
    engine.answer = lambda payload: (
        200,
        completion(payload, kv_transfer_params={"hidden_states_path": str(file)}),
    )
    with pytest.raises(ExtractionFault, match=r"has 274,877,90\d,\d+ bytes"):
        Extractor(client, tmp_path, (1, 2), 4).extract([1, 2, 3])
    assert not file.exists()
