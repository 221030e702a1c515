"""The client in SGLang's dialect, against answers in the shape that SGLang 0.5.23 gave."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from standin.answering import AnsweringEngine, answering

from infra.config.round import GenerateConfig
from infra.engines.client.bench import run, warm_up
from infra.engines.client.client import Client, RequestRefused, Sampling
from infra.engines.client.counters import SpecCounters
from infra.engines.sglang.capture import plugin_digest
from infra.engines.sglang.dialect import SglangDialect
from infra.errors import EngineError, ExtractionFault

Answer = dict[str, Any]


@pytest.fixture
def engine() -> Iterator[AnsweringEngine]:
    with answering() as server:
        server.answer = lambda payload: (200, answer(payload))
        server.stream = grown
        yield server


@pytest.fixture
def client(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr("infra.engines.client.client.BACKOFF_SECONDS", 0.001)
    with Client(engine.url, timeout=10, dialect=SglangDialect()) as talking:
        yield talking


def answer(payload: Answer, ids: tuple[int, ...] = (7, 8, 2), finish: Answer | None = None, **meta: Any) -> Answer:
    reason = {"type": "stop", "matched": 2} if finish is None else finish
    return {
        "text": "...",
        "output_ids": list(ids),
        "prompt_token_ids": payload["input_ids"],
        "meta_info": {"finish_reason": reason, "completion_tokens": len(ids), **meta},
    }


def grown(payload: Answer) -> Iterator[Answer]:
    """A streamed answer whose events have all tokens so far."""
    for count in (1, 4, 5):
        event = answer(payload, (5, 6, 7, 8, 2)[:count], **counts(1, 3, [1]) if count == 5 else {})
        if count < 5:
            event["meta_info"]["finish_reason"] = None
        yield event


def added(payload: Answer) -> Iterator[Answer]:
    """The same answer in events that have the new tokens alone (``--incremental-streaming-output``)."""
    known = 0
    for event in grown(payload):
        ids = event["output_ids"]
        yield event | {"output_ids": ids[known:]}
        known = len(ids)


def counts(steps: int, drafts: int, by_length: list[int]) -> Answer:
    accepted = sum(length * count for length, count in enumerate(by_length))
    return {
        "spec_verify_ct": steps,
        "spec_num_proposed_drafts": steps * drafts,
        "spec_num_correct_drafts": accepted,
        "spec_correct_drafts_histogram": by_length,
    }


def test_an_answer_is_token_ids_and_every_sampling_value_is_named(engine: AnsweringEngine, client: Client) -> None:
    made = client.generate([1, 2, 3], Sampling(max_tokens=9, temperature=0.5, top_p=0.9, seed=4))
    assert (made.token_ids, made.finish_reason, made.prompt_ids) == ([7, 8, 2], "stop", [1, 2, 3])
    [sent] = engine.requests
    assert sent["input_ids"] == [1, 2, 3]
    assert sent["sampling_params"] == {
        "max_new_tokens": 9, "temperature": 0.5, "top_p": 0.9, "sampling_seed": 4, "top_k": -1, "min_p": 0.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    said = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    said |= {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    client.generate([1], Sampling.of(GenerateConfig.model_validate(said), max_tokens=3))
    assert engine.requests[-1]["sampling_params"].items() >= said.items()
    engine.answer = lambda payload: (200, answer(payload, finish={"type": "length", "length": 3}))
    assert client.generate([1], Sampling(max_tokens=3)).finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_token_ids": [1, 2]}, "prompt of 2 tokens"),
        ({"prompt_token_ids": None}, "no prompt"),
        ({"output_ids": None}, "without token ids"),
        ({"meta_info": {"finish_reason": None}}, "without a finish reason"),
        ({"meta_info": {"finish_reason": {"type": "stop", "matched": "NaN happened"}}}, "NaN happened"),
        ({"meta_info": {"finish_reason": {"type": "abort", "message": "out of pages"}}}, "out of pages"),
    ],
)
def test_what_is_no_answer_is_an_error(engine: AnsweringEngine, client: Client, change: Answer, words: str) -> None:
    engine.answer = lambda payload: (200, answer(payload) | change)
    with pytest.raises(EngineError, match=words) as caught:
        client.generate([1, 2, 3], Sampling(max_tokens=3))
    assert not isinstance(caught.value, RequestRefused)


def test_a_refused_request_is_told_apart_however_it_is_said(engine: AnsweringEngine, client: Client) -> None:
    engine.answer = lambda payload: (400, {"error": {"message": "longer than the model's context length"}})
    with pytest.raises(RequestRefused, match="longer than the model's context length"):
        client.generate([1], Sampling(max_tokens=3))
    abort = {"type": "abort", "status_code": 400, "message": "exceeds the maximum allowed length"}
    engine.answer = lambda payload: (200, answer(payload, finish=abort))
    with pytest.raises(RequestRefused, match="exceeds the maximum"):
        client.generate([1], Sampling(max_tokens=3))
    assert len(engine.requests) == 2


@pytest.mark.parametrize("stream", [grown, added])
def test_a_stream_is_read_whether_its_events_grow_or_add(engine: AnsweringEngine, client: Client, stream: Any) -> None:
    engine.stream = stream
    timed = client.stream([1, 2], Sampling(max_tokens=5))
    assert (timed.token_ids, timed.finish_reason, timed.pieces) == ([5, 6, 7, 8, 2], "stop", 2)
    gaps = [seconds for _, seconds in timed.gaps]
    assert gaps[0] == gaps[1] == gaps[2]


def test_a_stream_that_breaks_off_is_an_error(engine: AnsweringEngine, client: Client) -> None:
    engine.stream = lambda payload: iter(list(added(payload))[:2])
    with pytest.raises(EngineError, match="ended after 4 tokens"):
        client.stream([1, 2], Sampling(max_tokens=5))
    engine.stream = lambda payload: iter([*list(added(payload))[:1], {"error": {"message": "scheduler died"}}])
    with pytest.raises(EngineError, match="scheduler died"):
        client.stream([1, 2], Sampling(max_tokens=5))


def test_counters_are_summed_over_the_answers(engine: AnsweringEngine, client: Client) -> None:
    client.generate([1], Sampling(max_tokens=3))
    assert client.spec_counters() is None
    shares = iter((counts(4, 3, [1, 1, 0, 2]), {}, counts(3, 3, [2, 1])))
    engine.answer = lambda payload: (200, answer(payload, **next(shares)))
    for _ in range(3):
        client.generate([1], Sampling(max_tokens=3))
    counters = client.spec_counters()
    assert counters == SpecCounters(7, 21, 8, (4, 2, 2))


def test_a_measurement_has_the_shares_of_its_own_answers(engine: AnsweringEngine, client: Client) -> None:
    warm_up(client, [[1]], concurrency=1)
    measured = run(client, [[1], [2]], sampling=Sampling(5), concurrency=2)
    assert measured.counters == SpecCounters(2, 6, 0, (0, 0, 0))


def test_a_conversation_is_tokenised_by_the_engines_template(engine: AnsweringEngine, client: Client) -> None:
    engine.answer = lambda payload: (200, {"tokens": [4, 5]})
    assert client.tokenize_chat([{"role": "user", "content": "hi"}], {"thinking": False}) == [4, 5]
    [sent] = engine.requests
    assert sent["messages"] == [{"role": "user", "content": "hi"}]
    assert sent["chat_template_kwargs"] == {"thinking": False}


def test_an_extraction_is_asked_for_by_a_name_of_its_own(engine: AnsweringEngine, client: Client) -> None:
    report = json.dumps({"plugin": plugin_digest(), "file": "/s/a.safetensors", "layer_ids": [1, 14]})
    engine.answer = lambda payload: (500, {}) if len(engine.requests) == 1 else (200, answer(payload, eagle3=[report]))
    assert client.extract([4, 5, 6]) == ("/s/a.safetensors", 7, (1, 14))
    assert len({sent["rid"] for sent in engine.requests}) == 2
    assert all(sent["sampling_params"]["max_new_tokens"] == 1 for sent in engine.requests)


def test_an_extraction_of_other_tokens_or_without_the_plugin_is_a_fault(
    engine: AnsweringEngine, client: Client
) -> None:
    with pytest.raises(ExtractionFault, match="plugin"):
        client.extract([4, 5, 6])
    engine.answer = lambda payload: (200, answer(payload) | {"prompt_token_ids": [4, 5]})
    with pytest.raises(ExtractionFault, match="other tokens"):
        client.extract([4, 5, 6])
