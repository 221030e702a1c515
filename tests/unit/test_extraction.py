"""The extract step without a round: it stores what the engine wrote, and what stops it leaves nothing behind."""

import json
import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from standin.extracting import FILES, TAPS, Shape, engine, make_files, make_round
from standin.small_disk import fill, small_disk

from infra.engines.client.client import Client
from infra.engines.client.extraction import Extractor
from infra.engines.client.flights import Flights
from infra.engines.vllm.dialect import VllmDialect
from infra.errors import DiskFull, EngineError, GateError
from infra.round.context import RoundContext
from infra.round.states import discard_shard, faulty_shards, quarantined_samples, shards_of
from infra.steps.extract import Extraction
from infra.store.reader import StatesReader

SHAPE = Shape(samples=60, tokens=12, hidden=64, concurrency=8, shard_bytes=1 << 16)
"""Ten samples a shard."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the engine's files, its staging and the state of this machine are."""
    return tmp_path


@pytest.fixture
def context(folder: Path) -> RoundContext:
    return make_round(folder, folder / "store", SHAPE, make_files(folder, SHAPE))


@pytest.fixture
def extractor(context: RoundContext, folder: Path) -> Iterator[Extractor]:
    with engine(folder) as url, Client(url, VllmDialect()) as client:
        yield Extractor(client, folder / "staging", TAPS, SHAPE.hidden)


def extract(context: RoundContext, extractor: Extractor, quarantined: tuple[str, ...] = ()) -> None:
    todo = shards_of(context)
    with Extraction(context, extractor, Flights(), todo, quarantined) as extraction:
        for plan in todo:
            extraction.shard(plan)


def temporaries(context: RoundContext) -> list[str]:
    return [info.path for info in context.store.temporaries(older_than_seconds=-60)]


def test_what_is_stored_is_what_the_engine_wrote(context: RoundContext, extractor: Extractor, folder: Path) -> None:
    threads = torch.get_num_threads()
    extract(context, extractor, quarantined=("s7", "s59"))
    assert faulty_shards(context, deep=True) == {}
    assert [sample.row for sample in quarantined_samples(context)] == [7, 59]
    reader = StatesReader(context.store.url, context.prefix("hidden"))
    assert reader.rows == [row for row in range(SHAPE.samples) if row not in (7, 59)]
    files = [load_file(folder / "files" / f"{number}.safetensors") for number in range(FILES)]
    for row in reader.rows:
        assert torch.equal(reader.read(row)["hidden_states"], files[row % FILES]["hidden_states"])
        assert torch.equal(reader.read(row)["token_ids"], files[row % FILES]["token_ids"])
    assert list((folder / "staging").iterdir()) == []
    assert temporaries(context) == []
    assert torch.get_num_threads() == threads


def test_final_states_that_lead_to_other_tokens_stop_it_and_no_shard_stays(folder: Path, context: RoundContext) -> None:
    (folder / "files" / "next.json").write_text(json.dumps({str(number): 5 for number in range(FILES)}))
    with engine(folder) as url, Client(url, VllmDialect()) as client:
        extractor = Extractor(client, folder / "staging", TAPS, SHAPE.hidden)
        with pytest.raises(GateError, match=r"agree with the engine's own token in 0\.0% of \d+ probes"):
            extract(context, extractor)
    assert not [info.path for info in context.store.list() if info.path.endswith("manifest.parquet")]
    assert temporaries(context) == []


def test_leaving_it_in_the_middle_leaves_what_is_committed_and_nothing_else(
    context: RoundContext, extractor: Extractor
) -> None:
    todo = shards_of(context)
    with Extraction(context, extractor, Flights(), todo) as extraction:
        extraction.shard(todo[0])
        extraction.shard(todo[1])
    assert list(faulty_shards(context, deep=True)) == todo[2:]
    assert temporaries(context) == []


def test_a_full_disk_is_waited_for_and_nothing_is_lost(
    context: RoundContext, extractor: Extractor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        small = make_round(tmp_path, disk, SHAPE, [sample.input_ids for sample in context.samples[:FILES]])

        def make_room(error: BaseException) -> bool:
            assert isinstance(error, DiskFull)
            waited.append(error.what)
            (disk / "ballast").unlink(missing_ok=True)
            return True

        monkeypatch.setattr(small.disk, "wait", make_room)
        monkeypatch.setattr(small.disk, "before", lambda what, **_: fill(disk, leave=8192) and None)
        extract(small, extractor)
        assert len(waited) >= len(shards_of(small))
        assert faulty_shards(small, deep=True) == {}
        assert temporaries(small) == []


def resume(context: RoundContext, url: str, staging: Path) -> None:
    """What the task does: shards that verify are left alone, what is left of others goes."""
    todo = list(faulty_shards(context, deep=False))
    for plan in todo:
        discard_shard(context, plan)
    with Client(url, VllmDialect()) as client:
        extractor = Extractor(client, staging, TAPS, SHAPE.hidden)
        with Extraction(context, extractor, Flights(), todo) as extraction:
            for plan in todo:
                extraction.shard(plan)


def test_an_engine_that_dies_loses_nothing_that_is_committed(context: RoundContext, folder: Path) -> None:
    todo = shards_of(context)
    with engine(folder) as url, Client(url, VllmDialect()) as client:
        extractor = Extractor(client, folder / "staging", TAPS, SHAPE.hidden)
        with Extraction(context, extractor, Flights(), todo) as extraction:
            for plan in todo[:3]:
                extraction.shard(plan)
            client.close()  # what a server's death looks like from here
            with pytest.raises(EngineError):
                list(map(extraction.shard, todo[3:]))
    assert temporaries(context) == []
    committed = {plan for plan in todo if plan not in faulty_shards(context, deep=True)}
    assert set(todo[:3]) <= committed
    with engine(folder) as url:
        resume(context, url, folder / "staging")
    assert faulty_shards(context, deep=True) == {}


def test_kill_9_at_any_moment_loses_nothing_that_is_committed(
    context: RoundContext, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.gates.capture.PROBES", 0)
    threads, dice = torch.get_num_threads(), random.Random(3)
    torch.set_num_threads(1)  # its threads do not survive a fork
    before: set[int] = set()
    with engine(folder) as url:
        for _ in range(6):
            child = multiprocessing.get_context("fork").Process(target=resume, args=(context, url, folder / "staging"))
            child.start()
            child.join(dice.uniform(0.0, 0.3))
            child.kill()
            child.join()
            faults = {plan.number for plan in faulty_shards(context, deep=True)}
            committed = {plan.number for plan in shards_of(context)} - faults
            assert before <= committed
            before = committed
        resume(context, url, folder / "staging")
    torch.set_num_threads(threads)
    assert faulty_shards(context, deep=True) == {}
    assert context.store.sweep_temporaries(older_than_seconds=-60) >= 0
    assert temporaries(context) == []
