"""The HTTP front before a fake extractor, over real HTTP: what speculators' client asks, and what it must not."""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file
from speculators.data_generation.offline import check_hidden_states
from speculators.data_generation.vllm_client import generate_hidden_states

from infra.engines.client.client import RequestRefused
from infra.engines.client.extraction import States
from infra.engines.client.front import Front
from infra.errors import EngineError, ExtractionFault

MODEL, VOCABULARY = "/models/tiny", 100


class FakeExtractor:
    """States that the tokens decide; certain first tokens make it fail."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.gate: threading.Event | None = None
        self.arrived, self.left = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def extract(self, token_ids: Sequence[int]) -> States:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.arrived.set()
        try:
            if self.gate is not None:
                assert self.gate.wait(30)
            if token_ids[0] == 98:
                raise RequestRefused("the prompt is longer than max_model_len")
            if token_ids[0] == 99:
                raise ExtractionFault("the engine did not write x.safetensors")
            ids = torch.tensor(token_ids)
            return States(ids.reshape(-1, 1, 1).expand(-1, 4, 8).to(torch.bfloat16), ids, 5)
        finally:
            with self._lock:
                self.now -= 1
            self.left.set()


@pytest.fixture
def source() -> FakeExtractor:
    return FakeExtractor()


@pytest.fixture
def front(source: FakeExtractor, tmp_path: Path) -> Iterator[Front]:
    with Front(source, MODEL, VOCABULARY, tmp_path / "states", concurrency=2) as running:
        yield running


def ask(front: Front, **changes: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1, "return_token_ids": True} | changes
    return httpx.post(f"{front.address}/v1/completions", json=body, trust_env=False, timeout=60)


def files(front: Front) -> list[Path]:
    return sorted(front.folder.iterdir())


def test_speculators_own_client_gets_its_states(front: Front) -> None:
    client = openai.OpenAI(base_url=f"{front.address}/v1", api_key="EMPTY", max_retries=0)
    assert [model.id for model in client.models.list().data] == [MODEL]
    path, parameters = generate_hidden_states(client, MODEL, {"input_ids": [4, 5, 6]}, max_retries=0)
    loaded = load_file(path)
    check_hidden_states(loaded, [4, 5, 6])
    assert parameters["hidden_states_path"] == path
    assert loaded["hidden_states"].shape == (3, 4, 8)
    assert loaded["hidden_states"].dtype == torch.bfloat16
    assert loaded["token_ids"].dtype == torch.int64
    assert not Path(f"{path}.lock").exists()
    assert files(front) == [Path(path)]


def test_it_tells_its_health_and_counts(source: FakeExtractor, tmp_path: Path) -> None:
    ill: list[EngineError] = []

    def healthy() -> None:
        if ill:
            raise ill[0]

    with Front(source, MODEL, VOCABULARY, tmp_path / "s", healthy=healthy) as front:
        assert ask(front).status_code == 200
        assert httpx.get(f"{front.address}/health", trust_env=False).json() == {"status": "ok", "served": 1}
        ill.append(EngineError("vllm-extract ended: killed by signal 9"))
        reply = httpx.get(f"{front.address}/health", trust_env=False)
        assert reply.status_code == 503
        assert "killed by signal 9" in reply.json()["error"]["message"]
    assert not list(front.folder.iterdir()), "what nobody fetched is gone at the end"


@pytest.mark.parametrize(
    ("changes", "status", "sentence"),
    [
        ({"prompt": "text"}, 400, "must be a list of token ids"),
        ({"prompt": []}, 400, "not empty"),
        ({"prompt": [1, "2"]}, 400, "must be a list of token ids"),
        ({"prompt": [1, True]}, 400, "must be a list of token ids"),
        ({"prompt": [[1, 2]]}, 400, "must be a list of token ids"),
        ({"prompt": [1, 100]}, 400, "token ids run from 1 to 100; the target has 100 ids"),
        ({"prompt": [-1]}, 400, "token ids run from -1"),
        ({"max_tokens": 16}, 400, "send max_tokens 1"),
        ({"stream": True}, 400, "no stream"),
        ({"model": "other"}, 404, "model 'other' is not served here, '/models/tiny' is"),
        ({"prompt": [98]}, 400, "longer than max_model_len"),
        ({"prompt": [99]}, 502, "the engine did not write x.safetensors"),
    ],
)
def test_bad_requests_and_failures_are_told(front: Front, changes: dict[str, Any], status: int, sentence: str) -> None:
    reply = ask(front, **changes)
    assert reply.status_code == status
    assert sentence in reply.json()["error"]["message"]
    assert files(front) == []
    assert ask(front).status_code == 200


def test_what_is_no_request_of_ours_is_told_so(front: Front) -> None:
    with httpx.Client(base_url=front.address, trust_env=False) as http:
        assert "is not JSON" in http.post("/v1/completions", content=b"{").json()["error"]["message"]
        assert "no JSON object" in http.post("/v1/completions", json=[1]).json()["error"]["message"]
        chat = http.post("/v1/chat/completions", json={"messages": []})
        assert chat.status_code == 404
        assert "/v1/completions" in chat.json()["error"]["message"]
        assert http.get("/metrics").status_code == 404
        assert http.post("/v1/completions", content=iter([b"{}"])).status_code == 411
    large = HTTPConnection(front.address.removeprefix("http://"), timeout=60)
    large.putrequest("POST", "/v1/completions")
    large.putheader("Content-Length", str(1 << 40))
    large.endheaders()
    assert large.getresponse().status == 413
    large.close()


def test_states_that_the_client_did_not_wait_for_are_deleted(source: FakeExtractor, front: Front) -> None:
    source.gate = threading.Event()
    body = json.dumps({"prompt": [1, 2]}).encode()
    host, port = front.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as impatient:
        impatient.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert source.arrived.wait(30)
    source.gate.set()
    assert source.left.wait(30)
    assert ask(front).status_code == 200
    assert front.served == 1
    assert len(files(front)) == 1


def test_a_taken_port_is_named(source: FakeExtractor, front: Front, tmp_path: Path) -> None:
    port = int(front.address.rpartition(":")[2])
    with pytest.raises(EngineError, match=f"cannot listen on port {port}: Address already in use.*another port"):
        Front(source, MODEL, VOCABULARY, tmp_path / "other", port=port)


def test_no_more_are_worked_on_at_once_than_was_said(source: FakeExtractor, tmp_path: Path) -> None:
    source.gate = threading.Event()
    answers: SimpleQueue[int] = SimpleQueue()
    with Front(source, MODEL, VOCABULARY, tmp_path / "s", concurrency=1) as front:
        threads = [threading.Thread(target=lambda: answers.put(ask(front).status_code)) for _ in range(12)]
        for thread in threads:
            thread.start()
        # One is worked on and eight wait; the others are told at once.
        assert [answers.get(timeout=60) for _ in range(3)] == [503] * 3
        source.gate.set()
        assert [answers.get(timeout=60) for _ in range(9)] == [200] * 9
    assert source.most == 1
