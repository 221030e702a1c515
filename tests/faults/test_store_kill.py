"""kill -9 of writers at any moment: what is committed stays whole, and the next run completes exactly."""

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.store.answers import Answer, AnswerLog, read_answers
from infra.store.hidden import discard_shard, plan_shards, read_manifest, verify_shard
from infra.store.manifest import StatesMeta
from infra.store.objects import ObjectStore
from infra.store.reader import StatesReader
from infra.store.writer import ShardWriter

PREFIX = "rounds/r/hidden/k"
META = StatesMeta((2, 15), "pre_norm", "bf16", 64, "vllm", "0.32.0", "rev")
TOKENS = {row: [row * 100 + place for place in range(20 + row % 7)] for row in range(60)}
PLANS = plan_shards([len(ids) for ids in TOKENS.values()], bytes_per_token=384, shard_bytes=100_000)
KILLS = 12
FORK = multiprocessing.get_context("fork")  # a fresh interpreter takes seconds to import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's thread pool does not survive a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def states(row: int, seed: int) -> torch.Tensor:
    return torch.full((len(TOKENS[row]), 3, 64), float(seed * 1000 + row), dtype=torch.bfloat16)


def write_all(store: ObjectStore, seed: int) -> None:
    for plan in PLANS:
        fault = verify_shard(store, PREFIX, plan, META, TOKENS)
        if fault is None:
            continue
        assert fault.missing, fault
        write_shard(store, PREFIX, plan, seed)


def write_shard(store: ObjectStore, prefix: str, plan: Any, seed: int) -> bool:
    writer = ShardWriter(store, prefix, plan, META, 30_000)
    for row in plan.rows:
        writer.add(row, TOKENS[row], states(row, seed))
    return writer.commit()


def committed(store: ObjectStore) -> dict[int, bytes]:
    """The manifests there are; each must verify."""
    found = {}
    for plan in PLANS:
        fault = verify_shard(store, PREFIX, plan, META, TOKENS)
        assert fault is None or fault.missing, fault
        if fault is None:
            found[plan.number] = store.get(f"{PREFIX}/{plan.number:05d}/manifest.parquet")
    return found


def kill_after(work: Callable[..., None], args: tuple[Any, ...], seconds: float) -> bool:
    """Run ``work`` in a child and kill -9 it after so long; False if it had ended by itself."""
    child: BaseProcess = FORK.Process(target=work, args=args)
    child.start()
    child.join(seconds)
    running = child.is_alive()
    child.kill()
    child.join()
    assert running or child.exitcode == 0
    return running


def test_killed_shard_writers_lose_nothing_committed(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}")
    dice = random.Random(2)
    began = time.monotonic()
    write_all(store, seed=0)
    whole = time.monotonic() - began
    discarded = [discard_shard(store, PREFIX, plan) for plan in PLANS]
    assert min(discarded) > 0
    assert committed(store) == {}

    killed = 0
    before: dict[int, bytes] = {}
    while killed < KILLS:
        killed += kill_after(write_all, (store, 1 + killed), dice.uniform(0, whole / 3))
        after = committed(store)
        assert before.items() <= after.items(), "a committed manifest went or changed"
        before = after
        if len(after) == len(PLANS):
            for plan in PLANS:
                discard_shard(store, PREFIX, plan)
            before = {}

    write_all(store, seed=99)
    assert before.items() <= committed(store).items()
    reader = StatesReader(store.url, PREFIX)
    assert reader.rows == sorted(TOKENS)
    for row in reader.rows:
        found = reader.read(row)
        assert found["token_ids"].tolist() == TOKENS[row]
        assert found["hidden_states"].shape == (len(TOKENS[row]), 3, 64)
        assert len(found["hidden_states"].unique()) == 1

    store.sweep_temporaries(older_than_seconds=-1)
    for plan in PLANS:
        folder = tmp_path / PREFIX / f"{plan.number:05d}"
        named = {*read_manifest(store, PREFIX, plan).objects, "manifest.parquet"}
        left = {path.name for path in folder.iterdir()}
        assert left >= named
        if plan.number not in before:  # written just now: its earlier tries were cleared away
            assert left == named


def race(store: ObjectStore, prefix: str, seed: int, start: Any, wins: Any) -> None:
    start.wait()
    if write_shard(store, prefix, PLANS[0], seed):
        wins.put(seed)


def test_of_two_processes_with_one_shard_one_wins(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}")
    for attempt in range(10):
        prefix = f"{PREFIX}{attempt}"
        start, wins = FORK.Barrier(2), FORK.SimpleQueue()
        children = [FORK.Process(target=race, args=(store, prefix, seed, start, wins)) for seed in (1, 2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0
        winner = wins.get()
        assert wins.empty()
        assert verify_shard(store, prefix, PLANS[0], META, TOKENS) is None
        reader = StatesReader(store.url, prefix)
        assert all(torch.equal(reader.read(row)["hidden_states"], states(row, winner)) for row in reader.rows)
        assert len(store.list(prefix)) == 1 + len(read_manifest(store, prefix, PLANS[0]).objects)


def answer_all(store: ObjectStore, journal: Path, count: int, acknowledge: int) -> None:
    with AnswerLog(store, "answers", journal) as log:
        for number in range(count):
            if f"id-{number}" in log:
                continue
            log.add(answer(number))
            os.write(acknowledge, number.to_bytes(4, "little"))
            if number % 13 == 12:
                log.commit()


def answer(number: int) -> Answer:
    messages = [{"role": "user", "content": "word " * (number % 50)}]
    return Answer(f"id-{number}", messages, [number] * 10, [number] * 90, "stop", "vllm", {}, "ok", 0)


def test_killed_answer_writers_lose_nothing_acknowledged(tmp_path: Path) -> None:
    store, journal = ObjectStore(f"file://{tmp_path / 'store'}"), tmp_path / "answers.jsonl"
    dice = random.Random(3)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    acknowledged: set[str] = set()
    killed, count = 0, 600
    while killed < KILLS and len(acknowledged) < count:
        killed += kill_after(answer_all, (store, journal, count, writing), dice.uniform(0.01, 0.1))
        try:
            data = os.read(reading, 1 << 16)
        except BlockingIOError:
            data = b""
        acknowledged |= {f"id-{int.from_bytes(data[at : at + 4], 'little')}" for at in range(0, len(data), 4)}
        with AnswerLog(store, "answers", journal) as log:
            done = log.done()
        assert acknowledged <= set(done)
        assert all(done[name] == answer(int(name[3:])) for name in done)
    assert killed
    assert acknowledged

    answer_all(store, journal, count, writing)
    with AnswerLog(store, "answers", journal) as log:
        log.finish()
    os.close(reading)
    os.close(writing)
    assert AnswerLog.finished(store, "answers")
    assert set(read_answers(store, "answers")) == {f"id-{number}" for number in range(count)}
    assert read_answers(store, "answers") == {f"id-{number}": answer(number) for number in range(count)}
