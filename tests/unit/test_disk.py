"""File systems told apart, a full one recognised, and shared memory that was ours."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from standin.small_disk import fill, small_disk
from standin.waiting import wait_for

from infra.errors import StoreError
from infra.machine.disk import SHARED_MEMORY, file_system, is_full
from infra.machine.host import free_disk
from infra.machine.processes.guarded import Guarded, Spec, clean_environment
from infra.machine.segments import forget_segments, leftover_segments, note_segments

HOLDER = """
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=1 << 20)
resource_tracker.unregister(segment._name, "shared_memory")
segment.buf[:] = bytes(1 << 20)
print(segment.name, flush=True)
sys.stdin.read() if sys.argv[1:] else __import__("threading").Event().wait()
"""


def test_folders_on_one_file_system_are_told_from_others(tmp_path: Path) -> None:
    here, not_yet = tmp_path / "here", tmp_path / "a" / "b"
    here.mkdir()
    found, shared = file_system(here), file_system(SHARED_MEMORY)
    assert file_system(not_yet).device == found.device != shared.device
    assert file_system(not_yet).mount == found.mount
    assert shared.mount == SHARED_MEMORY
    assert abs(shared.free - free_disk(SHARED_MEMORY)) < shared.total / 10


def test_a_small_disk_has_its_own_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        assert file_system(disk / "deeper" / "still").mount == disk
        assert file_system(disk).total == 1 << 20
        fill(disk, leave=1 << 16)
        assert file_system(disk).free == 1 << 16


def test_a_full_disk_is_recognised_in_whatever_words(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        fill(disk)
        with pytest.raises(OSError) as by_number:
            (disk / "x").write_bytes(bytes(1 << 20))
        with pytest.raises(Exception) as by_words:  # safetensors has an exception of its own
            save_file({"x": np.zeros(1 << 18, np.float32)}, disk / "y")
    wrapped = StoreError("could not write x")
    wrapped.__cause__ = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert all(map(is_full, (by_number.value, by_words.value, wrapped)))
    assert not any(
        map(is_full, (None, StoreError("damaged"), OSError(errno.EACCES, "no"), ValueError("full of errors")))
    )


@pytest.fixture
def bystander() -> Iterator[str]:
    """A segment of another program's, which nobody has mapped."""
    segment = SharedMemory(create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
    segment.close()
    yield segment.name
    (SHARED_MEMORY / segment.name).unlink()


def test_segments_of_a_dead_tree_are_leftovers_and_no_others(tmp_path: Path, bystander: str) -> None:
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    spec = Spec((sys.executable, "-c", HOLDER), "vllm extract", log, clean_environment({}), grace_seconds=0.0)
    with Guarded.start(spec, run_dir) as process:
        wait_for(lambda: log.exists() and log.read_text().endswith("\n"), "the holder says its segment's name")
        name = log.read_text().strip()
        note_segments(run_dir)
        assert leftover_segments(run_dir) == [], "its tree lives"
        process.stop(grace_seconds=0.0)
    [left] = leftover_segments(run_dir)
    assert (left.path, left.size, left.purpose) == (SHARED_MEMORY / name, 1 << 20, "vllm extract")

    with open(left.path, "rb"):
        assert leftover_segments(run_dir) == [], "somebody has it open"
    other = left.path.with_name(f"kept-{left.path.name}")
    left.path.rename(other)
    try:
        left.path.write_bytes(b"another segment of that name")
        assert leftover_segments(run_dir) == [], "it is another file now"
    finally:
        other.replace(left.path)
    assert leftover_segments(run_dir) == [left]
    left.path.unlink()
    [note] = run_dir.glob("*.shm.json")
    other_hosts = json.dumps(json.loads(note.read_text()) | {"host": "another", "boot": "another"})
    forget_segments(run_dir)
    assert list(run_dir.glob("*.shm.json")) == []
    note.write_text(other_hosts)
    forget_segments(run_dir)
    assert note.read_text() == other_hosts, "what another host has left is its own to forget"
    assert (SHARED_MEMORY / bystander).exists()


def test_segments_of_a_tree_that_was_never_noted_stay(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HOLDER, "end"], input="", capture_output=True, text=True, check=True)
    segment = SHARED_MEMORY / done.stdout.strip()
    try:
        assert segment.exists()
        assert leftover_segments(tmp_path) == []
    finally:
        segment.unlink()
