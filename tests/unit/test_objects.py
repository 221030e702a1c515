"""The store's one write is atomic, its paths stay inside, its leftovers are told from work in progress."""

import errno
import fcntl
import os
import pickle
import threading
import time
from pathlib import Path
from typing import IO

import pytest

from infra.errors import StoreError
from infra.store.objects import ObjectMissing, ObjectStore
from infra.store.rounds import Pointer, RoundStore


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path / 'store'}")


def files(store: ObjectStore) -> list[str]:
    """Everything on disk, temporary names too."""
    root = Path(store.url.removeprefix("file://"))
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_put_get_range_size_exists_delete(store: ObjectStore) -> None:
    assert store.put("a/b/c.bin", b"0123456789")
    assert store.get("a/b/c.bin") == b"0123456789"
    assert store.get_range("a/b/c.bin", 2, 3) == b"234"
    assert store.size("a/b/c.bin") == 10
    assert store.exists("a/b/c.bin")
    assert not store.exists("a/b")
    store.delete("a/b/c.bin")
    store.delete("a/b/c.bin")
    assert not store.exists("a/b/c.bin")


def test_put_streams_a_file_and_leaves_it(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "big"
    source.write_bytes(os.urandom(20 << 20))
    store.put("big", source)
    assert store.get("big") == source.read_bytes()
    assert b"".join(map(bytes, store.iter_pieces("big"))) == source.read_bytes()
    assert files(store) == ["big"]


def test_put_overwrites_unless_told_not_to(store: ObjectStore) -> None:
    assert store.put("x", b"one", if_absent=True)
    assert not store.put("x", b"two", if_absent=True)
    assert store.get("x") == b"one"
    assert store.put("x", b"three")
    assert store.get("x") == b"three"
    assert files(store) == ["x"]


def test_one_of_many_writers_wins(store: ObjectStore) -> None:
    for attempt in range(20):
        barrier = threading.Barrier(8)
        won: list[bytes] = []

        def write(path: str, mine: bytes, barrier: threading.Barrier, won: list[bytes]) -> None:
            barrier.wait()
            if store.put(path, mine, if_absent=True):
                won.append(mine)

        threads = [
            threading.Thread(target=write, args=(f"race-{attempt}", bytes([n]) * 1000, barrier, won)) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [store.get(f"race-{attempt}")] == won


def test_a_full_disk_leaves_the_old_object_and_no_temporary(store: ObjectStore, tmp_path: Path) -> None:
    import resource
    import signal

    store.put("x", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # a write past 1 MiB now fails as on a full disk
    try:
        with pytest.raises(StoreError, match="could not write x"):
            store.put("x", bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.get("x") == b"old"
    assert files(store) == ["x"]


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a/.put-1", "a\0b"])
def test_paths_outside_the_store_are_refused(store: ObjectStore, path: str) -> None:
    for attempt in (lambda: store.put(path, b""), lambda: store.get(path), lambda: store.delete(path)):
        with pytest.raises(StoreError, match="no path inside a store"):
            attempt()
    with pytest.raises(StoreError):
        store.list(path or "..")


def test_what_is_not_there_is_named(store: ObjectStore) -> None:
    for attempt in (store.get, store.size, lambda path: list(store.iter_pieces(path))):
        with pytest.raises(ObjectMissing, match="a/b"):
            attempt("a/b")
    with pytest.raises(ObjectMissing, match="a/b"):
        store.get_range("a/b", 0, 1)


def test_a_range_past_the_end_is_an_error(store: ObjectStore) -> None:
    store.put("x", b"123")
    with pytest.raises(StoreError, match="ends early"):
        store.get_range("x", 1, 5)


def test_list_folders_and_delete_tree(store: ObjectStore) -> None:
    for path in ("a/1/x", "a/1/manifest.parquet", "a/2/y", "ab/z"):
        store.put(path, b"12345")
    assert [info.path for info in store.list("a")] == ["a/1/manifest.parquet", "a/1/x", "a/2/y"]
    assert [info.size for info in store.list()] == [5, 5, 5, 5]
    assert store.folders("a") == ["1", "2"]
    assert store.folders("nowhere") == []
    assert store.delete_tree("a") == 15
    assert store.delete_tree("a") == 0
    assert files(store) == ["ab/z"]
    assert store.folders("") == ["ab"]


def test_delete_tree_takes_manifests_first(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("a/0.bin", "a/manifest.parquet", "a/z/current.json", "a/z/1.bin"):
        store.put(path, b"1")
    gone: list[str] = []
    backend = type(store._open)
    monkeypatch.setattr(backend, "delete", lambda self, path: gone.append(path))
    store.delete_tree("a")
    assert set(gone[:2]) == {"a/manifest.parquet", "a/z/current.json"}


def test_sweep_takes_dead_writers_leftovers_only(store: ObjectStore) -> None:
    store.put("a/x", b"1")
    root = Path(store.url.removeprefix("file://"))
    dead, living, young = (root / "a" / f".put-{name}" for name in ("dead", "living", "young"))
    for file in (dead, living, young):
        file.write_bytes(b"half")
    hour_ago = time.time() - 3600
    os.utime(dead, (hour_ago, hour_ago))
    os.utime(living, (hour_ago, hour_ago))
    with living.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert [info.path for info in store.list("a")] == ["a/x"]
        assert store.sweep_temporaries() == 1
    assert files(store) == ["a/.put-living", "a/.put-young", "a/x"]
    assert store.sweep_temporaries(older_than_seconds=-1) == 2
    assert files(store) == ["a/x"]


def test_sweep_locks_as_a_network_file_system_lets_it(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS an exclusive lock takes a file that is open for writing, a shared one one that is open for reading."""
    root = Path(store.url.removeprefix("file://"))
    root.mkdir()
    (root / ".put-dead").write_bytes(b"half")
    flock = fcntl.flock

    def nfs(stream: IO[bytes], how: int) -> None:
        mode = fcntl.fcntl(stream, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == (os.O_RDONLY if how & fcntl.LOCK_EX else os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(stream, how)

    monkeypatch.setattr(fcntl, "flock", nfs)
    store.put("x", b"1")
    assert [info.path for info in store.temporaries(older_than_seconds=-1)] == [".put-dead"]
    assert store.sweep_temporaries(older_than_seconds=-1) == 1
    assert files(store) == ["x"]


def test_a_leftover_that_cannot_be_looked_at_is_told(store: ObjectStore) -> None:
    root = Path(store.url.removeprefix("file://"))
    root.mkdir()
    (root / ".put-loop").symlink_to(".put-loop")
    with pytest.raises(StoreError, match=r"could not look at .*\.put-loop"):
        store.temporaries()
    with pytest.raises(StoreError, match=r"could not remove .*\.put-loop"):
        store.sweep_temporaries()


def test_survives_pickling(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}")
    store.put("x", b"1")
    assert pickle.loads(pickle.dumps(store)).get("x") == b"1"


def test_folder_names_are_taken_literally(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/a b%20#c")
    store.put("x", b"1")
    assert (tmp_path / "a b%20#c" / "x").is_file()
    assert store.local_path("x") == tmp_path / "a b%20#c" / "x"


def test_unknown_kinds_of_store_are_refused() -> None:
    with pytest.raises(StoreError, match="not supported"):
        ObjectStore("ftp://host/x")


def test_a_rounds_pointer(store: ObjectStore) -> None:
    smoke = RoundStore(store, "smoke")
    assert smoke.current("hidden") is None
    assert smoke.keys("hidden") == []
    store.put(smoke.step_prefix("hidden", "k1") + "/x", b"")
    store.put(smoke.step_prefix("hidden", "k2") + "/x", b"")
    smoke.point("hidden", "k1", {"target": "r1"})
    smoke.point("hidden", "k2", {"target": "r2"})
    assert smoke.current("hidden") == Pointer("k2", {"target": "r2"})
    assert smoke.keys("hidden") == ["k1", "k2"]
    assert smoke.provenance() is None
    facts = {"round": {"name": "smoke"}, "keys": {"hidden": "k2"}}
    smoke.write_provenance(facts)
    assert smoke.provenance() == facts
    for damage in (b"", b"keys: [", b"keys: 5\nround: {}\n", b"\xff"):
        store.put("rounds/smoke/round.yaml", damage)
        with pytest.raises(StoreError, match=r"round\.yaml is damaged"):
            smoke.provenance()
    store.put("rounds/smoke/hidden/current.json", b'{"key": "k')
    with pytest.raises(StoreError, match=r"current\.json is damaged"):
        smoke.current("hidden")


def test_trouble_of_the_operating_system_is_told_as_the_stores(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path / 'store'}")
    store.put("a/b", b"x")
    (tmp_path / "store" / "loop").symlink_to("loop")
    for act in (
        lambda: store.get("loop"),
        lambda: store.get_range("loop", 0, 1),
        lambda: store.folders("loop"),
        lambda: store.put("loop/x", b""),
        lambda: store.delete("a"),
    ):
        with pytest.raises(StoreError, match="could not (read|list|write|delete)") as raised:
            act()
        assert str(tmp_path / "store") in str(raised.value)


def test_a_folder_that_cannot_be_read_does_not_pass_for_an_empty_one(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("rounds/one/x", b"x")
    scandir = os.scandir

    def broken(place: str) -> object:
        if str(place).endswith("one"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(StoreError, match=r"could not list .*rounds/one"):
        store.list("rounds")
    assert store.list("nowhere") == []
