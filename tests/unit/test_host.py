import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.machine import host

MIB = 2**20


def test_free_disk_of_a_place_that_does_not_exist_is_that_of_its_disk(tmp_path: Path) -> None:
    there = host.free_disk(tmp_path)
    not_yet = host.free_disk(tmp_path / "a" / "b")
    assert there > 0
    assert abs(there - not_yet) < 256 * MIB


def test_folder_bytes_counts_blocks_and_hard_links_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    empty = host.folder_bytes(folder)
    (folder / "sub" / "data").write_bytes(os.urandom(MIB))
    os.link(folder / "sub" / "data", folder / "again")
    used = host.folder_bytes(folder) - empty
    assert MIB <= used < 1.2 * MIB


def test_folder_bytes_of_a_sparse_file_is_not_its_length(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(64 * MIB)
    assert host.folder_bytes(tmp_path) < MIB


def test_folder_bytes_does_not_follow_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data").write_bytes(os.urandom(MIB))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "nowhere").symlink_to(tmp_path / "missing")
    assert host.folder_bytes(folder) < MIB


def test_folder_bytes_of_nothing_is_zero(tmp_path: Path) -> None:
    assert host.folder_bytes(tmp_path / "missing") == 0


def test_memory_available_is_positive_and_within_the_machine() -> None:
    assert 0 < host.memory_available() <= psutil.virtual_memory().total


def test_a_containers_limits_are_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's files are the boundary: a folder laid out like cgroup v2 stands for them."""
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_own_cgroups", lambda: [tmp_path / "inner", tmp_path])
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "memory.max").write_text("max\n")
    (tmp_path / "inner" / "memory.current").write_text("1\n")
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{90 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {20 * MIB}\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert host.memory_available() == 30 * MIB
    assert host.cpu_count() == 1


def test_cpu_count_follows_the_affinity() -> None:
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{one}}}); from infra.machine.host import cpu_count; print(cpu_count())"
    )
    root = Path(host.__file__).parents[2]
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "1"
    assert 1 <= host.cpu_count() <= len(os.sched_getaffinity(0))


def test_a_free_port_is_not_in_use_until_someone_listens() -> None:
    port = host.free_port()
    assert not host.port_in_use(port)
    with socket.create_server(("127.0.0.1", port)):
        assert host.port_in_use(port)
    assert not host.port_in_use(port)


def test_a_server_on_all_addresses_uses_the_port() -> None:
    with socket.create_server(("", 0)) as server:
        assert host.port_in_use(server.getsockname()[1])


def test_a_connection_that_is_over_does_not_use_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first waits in TIME_WAIT
        assert client.recv(1) == b""
        client.close()
    assert not host.port_in_use(port)
