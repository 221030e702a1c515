"""What a machine has learnt saves time, and stops nobody: damaged, unwritable, or written by two at once."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from standin.machine import Machine, new_machine
from standin.small_disk import fill, small_disk

from infra.config.round import RungConfig
from infra.engines.server.rung_memory import RungMemory
from infra.machine.learnt import amend, recall
from infra.machine.processes.guard import write_private
from infra.machine.segments import leftover_segments
from infra.round.rates import Rates, learn, learnt_rates, rates_path

LADDER = (RungConfig(name="first"), RungConfig(name="second"))
DAMAGES = [b"", b"garbage", b"[]", b"\xff", b'{"KEY": 5}', b'{"KEY": {"x": 1}}', b'{"KEY": null}']

RATES = Rates(
    start_seconds=35, generate_tokens=75, extract_tokens=230, train_tokens=260, serve_tokens=35, origin="measured"
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return new_machine(tmp_path).enter(monkeypatch)


def memory(folder: Path) -> RungMemory:
    return RungMemory(folder / "rungs.json", "vllm 1 cpu", "target r1", LADDER)


def damage(path: Path, data: bytes) -> None:
    """Put the damage where the file's one entry was."""
    [key] = json.loads(path.read_bytes())
    path.write_bytes(data.replace(b"KEY", json.dumps(key).encode()[1:-1]))


@pytest.mark.parametrize("data", DAMAGES)
def test_a_damaged_file_is_as_good_as_none_and_is_written_anew(data: bytes, machine: Machine, tmp_path: Path) -> None:
    memory(tmp_path).keep("extract", "second")
    damage(tmp_path / "rungs.json", data)
    assert memory(tmp_path).recall("extract") is None
    memory(tmp_path).keep("extract", "second")
    assert memory(tmp_path).recall("extract") == "second"

    context, rates = machine.round(), RATES
    learn(context, rates)
    assert learnt_rates(context) == rates
    damage(rates_path(context.settings), data)
    assert learnt_rates(context) is None
    learn(context, rates)
    assert learnt_rates(context) == rates


def test_rates_of_another_length_of_answers_count_until_there_are_own_ones(machine: Machine) -> None:
    short, long = machine.round(generate__max_tokens=8), machine.round(generate__max_tokens=64)
    measured = RATES.model_copy(update={"answer_tokens": 7.0, "origin": "measured here in an earlier round"})
    learn(short, measured)
    assert learnt_rates(short) == measured
    assert learnt_rates(long) == measured.model_copy(update={"answer_tokens": None})
    own = measured.model_copy(update={"extract_tokens": 9.0})
    learn(long, own)
    assert (learnt_rates(long), learnt_rates(short)) == (own, measured)


def test_a_full_disk_and_a_place_that_is_taken_stop_nobody(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        memory(disk).keep("extract", "first")
        fill(disk)
        memory(disk).keep("extract", "x" * 5000)
        assert memory(disk).recall("extract") == "first"
        assert not list(disk.glob("*.tmp"))
    (tmp_path / "file").write_text("")
    memory(tmp_path / "file").keep("extract", "first")
    assert memory(tmp_path / "file").recall("extract") is None


def test_of_many_writers_at_once_each_is_kept(tmp_path: Path) -> None:
    def note(number: int) -> None:
        amend(tmp_path / "x.json", lambda known: known.update({str(number): number}))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(note, range(40)))
    assert recall(tmp_path / "x.json") == {str(number): number for number in range(40)}


def test_what_a_writer_left_that_was_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    for name in ("x.json.tmp", f"x.json.{os.getpid()}.tmp"):
        (tmp_path / name).write_text("half of i")
    write_private(tmp_path / "x.json", "whole")
    assert (tmp_path / "x.json").read_text() == "whole"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"boot": 1}', '{"boot": "", "purpose": "x", "segments": [1]}', "5"])
def test_damaged_notes_of_segments_are_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / "vllm-extract-1.shm.json").write_text(text)
    assert leftover_segments(tmp_path, tmp_path) == []
