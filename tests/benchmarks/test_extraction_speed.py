"""How fast extraction is beside a plain copy of the same bytes, and its requests beside a light client.

The engine is a stand-in that costs next to nothing (``standin/linking_engine.py``), so no GPU is needed, and what is
measured is this project's own work: from the engine's file to committed shards that verify. Each figure has its rival
in the same run. EAGLE3_BENCHMARK_STORE names a folder for the store; by default it is in shared memory.
"""

import asyncio
import json
import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from standin.extracting import FILES, TAPS, Shape, engine, make_files, make_round

from infra.engines.client.client import Client
from infra.engines.client.extraction import Extractor
from infra.engines.client.flights import Flights
from infra.engines.vllm.dialect import VllmDialect
from infra.round.context import RoundContext
from infra.round.states import faulty_shards, shards_of
from infra.steps.extract import Extraction

WIDE = Shape(samples=96, tokens=1024, hidden=4096, concurrency=64, shard_bytes=1 << 29)
"""An 8B target: 34 MB a sample."""
TINY = Shape(samples=4000, tokens=16, hidden=64, concurrency=64, shard_bytes=1 << 22)
"""Samples that weigh nothing: requests alone are measured."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in shared memory."""
    made = Path(f"/dev/shm/eagle3-bench-{os.getpid()}")
    made.mkdir()
    yield made
    shutil.rmtree(made)


@dataclass
class Cost:
    """What a piece of work took.

    Attributes:
        seconds: by the clock.
        cpu: seconds of this process.
        memory: most anonymous memory of this process above what it had before, bytes.
        threads: most threads.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    memory: int = 0
    threads: int = 0


@contextmanager
def measured() -> Iterator[Cost]:
    """Around a piece of work; the cost is filled in at its end."""
    cost, ended = Cost(), threading.Event()
    held = _status("RssAnon")

    def watch() -> None:
        while not ended.wait(0.02):
            cost.memory = max(cost.memory, 1024 * (_status("RssAnon") - held))
            cost.threads = max(cost.threads, _status("Threads"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, cpu = time.perf_counter(), _cpu()
    yield cost
    cost.seconds, cost.cpu = time.perf_counter() - began, _cpu() - cpu
    ended.set()
    watcher.join()


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise LookupError(field)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def extract_all(context: RoundContext, url: str, staging: Path) -> Cost:
    """Every shard of the round to its manifest."""
    with Client(url, VllmDialect()) as client, measured() as cost:
        extractor = Extractor(client, staging, TAPS, context.target.shape.hidden_size)
        todo = shards_of(context)
        with Extraction(context, extractor, Flights(), todo) as extraction:
            for plan in todo:
                extraction.shard(plan)
    assert not list(staging.iterdir())
    return cost


def copy_all(files: Path, shape: Shape, to: Path) -> Cost:
    """The rival: the engine's files of all samples, copied one after another by ``shutil``, each synced."""
    to.mkdir()
    with measured() as cost:
        for row in range(shape.samples):
            copy = to / f"{row}.safetensors"
            shutil.copyfile(files / f"{row % FILES}.safetensors", copy)
            with copy.open("rb") as stream:
                os.fsync(stream.fileno())
    return cost


def cat_all(store: Path) -> Cost:
    """The rival of verification: every byte of the store is read once, in pieces of 128 KiB as ``cat`` does."""
    room = memoryview(bytearray(1 << 17))
    with measured() as cost:
        for file in store.rglob("*.safetensors"):
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(room):
                    pass
    return cost


async def _ask(port: int, bodies: Iterator[bytes]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for body in bodies:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
    writer.close()


def ask_lightly(url: str, context: RoundContext, shape: Shape) -> Cost:
    """The rival of the client: the same requests by one asyncio process that looks at no answer."""
    dialect = VllmDialect()
    bodies = iter([json.dumps(dialect.extraction(sample.input_ids)).encode() for sample in context.samples])

    async def ask() -> None:
        await asyncio.gather(*(_ask(int(url.rsplit(":", 1)[1]), bodies) for _ in range(shape.concurrency)))

    with measured() as cost:
        asyncio.run(ask())
    return cost


def show(title: str, rows: dict[str, tuple[str, ...]], *columns: str) -> None:
    """Print a table."""
    table = Table("", *columns, title=title)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    Console(width=110).print(table)


def _speeds(cost: Cost, size: float) -> tuple[str, ...]:
    """GB/s, CPU seconds a GB, memory, threads."""
    return f"{size / cost.seconds:.2f}", f"{cost.cpu / size:.2f}", f"{cost.memory / 1e6:,.0f}", str(cost.threads)


def test_states_go_from_the_engines_file_to_a_shard_almost_as_fast_as_a_copy(folder: Path) -> None:
    shape = WIDE
    store = Path(os.environ.get("EAGLE3_BENCHMARK_STORE", folder)) / "store"
    context = make_round(folder, store, shape, make_files(folder, shape))
    size = shape.samples * shape.state_bytes / 1e9
    with engine(folder) as url:
        extracted = extract_all(context, url, folder / "staging")
    with measured() as verified:
        assert faulty_shards(context, deep=True) == {}
    read = cat_all(store)
    shutil.rmtree(store)
    copied = copy_all(folder / "files", shape, store)
    shutil.rmtree(store)
    show(
        f"{size:.1f} GB of states, {shape.state_bytes / 1e6:.0f} MB a sample",
        {
            "engine's file to committed shard": _speeds(extracted, size),
            "plain copy": _speeds(copied, size),
            "verify": _speeds(verified, size),
            "plain read": _speeds(read, size),
        },
        "GB/s", "CPU s/GB", "memory, MB", "threads",
    )  # fmt: skip
    print(f"extraction / copy: {copied.seconds / extracted.seconds:.2f}")
    print(f"verify / read: {read.seconds / verified.seconds:.2f}")


def test_requests_are_sent_almost_as_fast_as_by_a_light_client(folder: Path) -> None:
    shape = TINY
    context = make_round(folder, folder / "store", shape, make_files(folder, shape))
    with engine(folder) as url:
        lightly = ask_lightly(url, context, shape)
        shutil.rmtree(folder / "staging")
        (folder / "staging").mkdir()
        extracted = extract_all(context, url, folder / "staging")
    show(
        f"{shape.samples} requests of {shape.tokens} tokens, {shape.concurrency} in flight",
        {
            name: (f"{shape.samples / cost.seconds:,.0f}", f"{1e6 * cost.cpu / shape.samples:,.0f}")
            for name, cost in (("extraction", extracted), ("light client", lightly))
        },
        "requests/s", "CPU, microseconds",
    )  # fmt: skip
    print(f"extraction / light client: {lightly.seconds / extracted.seconds:.2f}")
