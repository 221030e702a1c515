"""The store's contract over real HTTP, against moto's S3 server."""

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from moto.moto_server import threaded_moto_server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication

from infra.errors import StoreError
from infra.store import remote
from infra.store.answers import Answer, AnswerLog, read_answers
from infra.store.hidden import ShardPlan, verify_shard
from infra.store.manifest import StatesMeta
from infra.store.objects import ObjectMissing, ObjectStore
from infra.store.reader import StatesReader
from infra.store.rounds import RoundStore
from infra.store.samples import Sample, Samples, samples_fault, write_samples
from infra.store.writer import ShardWriter

META = StatesMeta((2, 15, 27), "pre_norm", "bf16", 576, "vllm", "0.32.0", "rev")
TOKENS = {row: [row * 1000 + place for place in range(50 + row)] for row in range(20)}
PLAN = ShardPlan(0, 0, 20)
PREFIX = "rounds/r/hidden/k"


@dataclass
class Wire:
    """What went over the wire: method, path with query, bytes of the answer."""

    requests: list[tuple[str, str, int]] = field(default_factory=list)

    def taken(self) -> list[tuple[str, str, int]]:
        taken, self.requests = self.requests, []
        return taken


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    """A bucket ``states`` on an S3 server; the environment points at it."""
    seen = Wire()

    class Watched(DomainDispatcherApplication):
        # moto looks and then writes, so two conditional writes at once could both win; S3 does it in one step.
        _writing = threading.Lock()

        def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
            if environ["REQUEST_METHOD"] == "GET":
                body = b"".join(super().__call__(environ, start_response))
            else:
                with self._writing:
                    body = b"".join(super().__call__(environ, start_response))
            where = environ["PATH_INFO"] + "?" + environ.get("QUERY_STRING", "")
            seen.requests.append((environ["REQUEST_METHOD"], where, len(body)))
            return [body]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threaded_moto_server, "DomainDispatcherApplication", Watched)
        server = threaded_moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="states")
        yield seen
        server.stop()


@pytest.fixture
def store(wire: Wire, request: pytest.FixtureRequest) -> ObjectStore:
    return ObjectStore(f"s3://states/{request.node.name.replace('[', '-').replace(']', '')}")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Multipart from 10 MiB on, in parts of 5 MiB, the least that S3 takes."""
    monkeypatch.setattr(remote, "PART_BYTES", 5 << 20)
    return 5 << 20


def test_objects(store: ObjectStore) -> None:
    assert store.list() == []
    assert store.folders("") == []
    assert store.put("a/b", b"0123456789")
    assert store.get("a/b") == b"0123456789"
    assert store.get_range("a/b", 2, 3) == b"234"
    assert store.get_range("a/b", 2, 0) == b""
    assert store.size("a/b") == 10
    assert store.exists("a/b")
    assert not store.exists("a")
    assert not store.exists("a/c")
    assert store.put("a/b", bytearray(b"new"))
    assert store.get("a/b") == b"new"
    assert store.local_path("a/b") is None
    for attempt in (
        store.get,
        store.size,
        lambda path: list(store.iter_pieces(path)),
        lambda path: store.get_range(path, 0, 1),
    ):
        with pytest.raises(ObjectMissing, match="a/c"):
            attempt("a/c")
    with pytest.raises(StoreError):
        store.get_range("a/b", 1, 5)
    store.delete("a/b")
    store.delete("a/b")
    assert not store.exists("a/b")


def test_listing_and_delete_tree(store: ObjectStore) -> None:
    for path in ("a/1/x", "a/1/manifest.parquet", "a/2/y", "ab/z"):
        store.put(path, b"12345")
    assert [(info.path, info.size) for info in store.list("a")] == [
        ("a/1/manifest.parquet", 5),
        ("a/1/x", 5),
        ("a/2/y", 5),
    ]
    assert len(store.list()) == 4
    assert store.list("a/1/x") == []
    assert store.folders("a") == ["1", "2"]
    assert store.folders("nowhere") == []
    assert store.delete_tree("a") == 15
    assert [info.path for info in store.list()] == ["ab/z"]
    assert store.folders("") == ["ab"]


def test_a_large_object_goes_up_in_parts(store: ObjectStore, wire: Wire, small_parts: int, tmp_path: Path) -> None:
    data = bytearray(torch.randint(0, 256, (3 * small_parts - 7,), dtype=torch.uint8).numpy().tobytes())
    source = tmp_path / "source"
    source.write_bytes(data)
    for name, what in (("memory", data), ("file", source)):
        wire.taken()
        assert store.put(name, what, if_absent=True)
        assert sum(method == "PUT" and "partNumber" in where for method, where, _ in wire.taken()) == 3
        assert store.get(name) == data
        assert not store.put(name, what, if_absent=True)
    assert store.sweep_temporaries(older_than_seconds=-1) == 0  # the refused ones aborted their uploads


@pytest.mark.parametrize("size", [1000, 10 << 20])
def test_one_of_many_conditional_writers_wins(store: ObjectStore, small_parts: int, size: int) -> None:
    stores = [ObjectStore(store.url) for _ in range(4)]
    for attempt in range(3):
        start = threading.Barrier(len(stores))

        def write(number: int, path: str = f"race-{attempt}", start: threading.Barrier = start) -> bool:
            start.wait()
            return stores[number].put(path, bytes([number]) * size, if_absent=True)

        with ThreadPoolExecutor(len(stores)) as pool:
            won = list(pool.map(write, range(len(stores))))
        assert won.count(True) == 1
        assert store.get(f"race-{attempt}") == bytes([won.index(True)]) * size


def test_unfinished_uploads_are_invisible_and_swept_when_old(store: ObjectStore, small_parts: int) -> None:
    client = boto3.client("s3")
    key = store.url.removeprefix("s3://states/") + "/half"
    upload = client.create_multipart_upload(Bucket="states", Key=key)["UploadId"]
    client.upload_part(Bucket="states", Key=key, UploadId=upload, PartNumber=1, Body=bytes(small_parts))
    assert not store.exists("half")
    assert store.list() == []
    century = 100 * 365 * 86_400.0
    assert store.sweep_temporaries(older_than_seconds=century) == 0  # moto says that every upload began in 2010
    assert ObjectStore("s3://states/elsewhere").sweep_temporaries(older_than_seconds=-1) == 0
    assert store.sweep_temporaries(older_than_seconds=-1) == 1
    # Others of this bucket are of tests whose server refuses to abort.
    assert key not in [begun["Key"] for begun in client.list_multipart_uploads(Bucket="states").get("Uploads", [])]


def states(row: int) -> torch.Tensor:
    return torch.full((len(TOKENS[row]), 4, 576), float(row), dtype=torch.bfloat16)


def write_shard(store: ObjectStore) -> bool:
    writer = ShardWriter(store, PREFIX, PLAN, META, 2 << 20)
    for row in PLAN.rows:
        writer.add(row, TOKENS[row], states(row))
    return writer.commit()


def test_shards_are_written_verified_and_refused_when_damaged(store: ObjectStore) -> None:
    assert write_shard(store)
    assert not write_shard(store)
    assert verify_shard(store, PREFIX, PLAN, META, TOKENS) is None
    path = next(info.path for info in store.list(PREFIX) if info.path.endswith(".safetensors"))
    whole = store.get(path)
    store.put(path, whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    assert "checksum" in str(verify_shard(store, PREFIX, PLAN, META, TOKENS))
    assert verify_shard(store, PREFIX, PLAN, META, TOKENS, deep=False) is None
    store.put(path, whole[:-1])
    assert "bytes" in str(verify_shard(store, PREFIX, PLAN, META, TOKENS, deep=False))
    store.delete(path)
    assert path in str(verify_shard(store, PREFIX, PLAN, META, TOKENS, deep=False))


def test_a_row_is_read_without_its_neighbours(store: ObjectStore, wire: Wire) -> None:
    write_shard(store)
    reader = StatesReader(store.url, PREFIX)
    assert reader.rows == list(range(20))
    wire.taken()
    first = reader.read(5)
    assert torch.equal(first["hidden_states"], states(5))
    assert first["token_ids"].tolist() == TOKENS[5]
    row_bytes = first["hidden_states"].nbytes
    fetched = [size for method, _, size in wire.taken() if method == "GET"]
    assert max(fetched) == row_bytes
    assert sum(fetched) < row_bytes + 10_000  # header and token ids of the object
    again = reader.read(4)
    assert [size for *_, size in wire.taken()] == [again["hidden_states"].nbytes]
    again["hidden_states"].zero_()  # what is handed out is the caller's
    assert torch.equal(reader.read(4)["hidden_states"], states(4))
    assert wire.taken() == []


def test_the_readers_cache_is_bounded(store: ObjectStore, wire: Wire) -> None:
    write_shard(store)
    reader = StatesReader(store.url, PREFIX, cache_bytes=states(0).nbytes + states(1).nbytes)
    for row in (0, 1, 2):
        reader.read(row)
    wire.taken()
    reader.read(2)
    assert wire.taken() == []
    reader.read(0)
    assert len(wire.taken()) == 1


def test_readers_in_threads_and_after_pickling(store: ObjectStore) -> None:
    write_shard(store)
    reader = pickle.loads(pickle.dumps(StatesReader(store.url, PREFIX)))

    def right(row: int) -> bool:
        return bool(torch.equal(reader.read(row)["hidden_states"], states(row)))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, [row for row in range(20) for _ in range(2)]))
    with pytest.raises(StoreError, match="row 20"):
        reader.read(20)


def test_answers_samples_and_pointers(store: ObjectStore, tmp_path: Path) -> None:
    answer = Answer("id-0", [{"role": "user", "content": "hi"}], [1], [2], "stop", "vllm", {}, "ok", 0)
    with AnswerLog(store, "answers", tmp_path / "journal") as log:
        log.add(answer)
        log.finish()
    assert AnswerLog.finished(store, "answers")
    assert set(read_answers(store, "answers")) == {"id-0"}
    with AnswerLog(store, "answers", tmp_path / "journal") as log:
        assert log.done() == {"id-0": answer}
    samples = [Sample(0, "id-0", answer.messages, [1, 2], [0, 1], "train", "stop", "vllm", {})]
    write_samples(store, "samples", samples)
    assert Samples(store, "samples") == samples
    assert samples_fault(store, "samples") is None
    smoke = RoundStore(store, "smoke")
    assert smoke.current("samples") is None
    smoke.point("samples", "k", {})
    pointer = smoke.current("samples")
    assert pointer is not None
    assert pointer.key == "k"


def test_what_the_server_refuses_is_said_without_the_secret(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, unused_port: int
) -> None:
    with pytest.raises(StoreError, match="could not write x in s3://no-such-bucket") as error:
        ObjectStore("s3://no-such-bucket").put("x", b"1")
    assert "hush-hush" not in str(error.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused_port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StoreError, match="AWS_ENDPOINT_URL"):
        ObjectStore("s3://states/x").get("x")


@pytest.fixture
def unused_port() -> int:
    """A port on which nothing listens."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
