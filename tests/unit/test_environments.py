"""What is known of environments without building one (tests/faults builds them)."""

import re
import sys
from pathlib import Path

import pytest

from infra.environments import building as environments
from infra.environments.building import build, check_machine, environment_python, status
from infra.environments.descriptions import LOCKS, descriptions, environment_key, pins
from infra.errors import EnvironmentBuildError

TINY = """
[tiny]
about = "a test"
version_of = "pebble"
locks = ["tiny.txt"]
gigabytes = 0.001
"""


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock folder with one environment, `tiny`."""
    monkeypatch.delenv("EAGLE3_ENV_TINY", raising=False)
    folder = tmp_path / "locks"
    folder.mkdir()
    (folder / "tiny.txt").write_text("# one package\npebble==1.5\n")
    (folder / "environments.toml").write_text(TINY)
    return folder


def test_what_is_not_built_is_said_with_the_command_that_builds_it(locks: Path, tmp_path: Path) -> None:
    (item,) = status(tmp_path, locks)
    assert (item.name, item.built, item.bytes, item.version) == ("tiny", False, 0, "1.5")
    half_made = item.path / "bin"
    half_made.mkdir(parents=True)
    (half_made / "python").symlink_to(sys.executable)
    with pytest.raises(EnvironmentBuildError, match="eagle3 engines install tiny"):
        environment_python("tiny", tmp_path, locks)
    (item.path / "built.json").write_text('{"bytes": 7}')
    assert environment_python("tiny", tmp_path, locks) == half_made / "python"
    assert [(item.built, item.bytes) for item in status(tmp_path, locks)] == [(True, 7)]
    for damage in (b"", b"{", b"[]", b"\xff"):
        (item.path / "built.json").write_bytes(damage)
        assert [(item.built, item.bytes) for item in status(tmp_path, locks)] == [(False, 0)]


def test_another_folder_can_take_an_environments_place(
    locks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_ENV_TINY", str(tmp_path / "mine"))
    with pytest.raises(EnvironmentBuildError, match="EAGLE3_ENV_TINY"):
        environment_python("tiny", tmp_path, locks)
    (tmp_path / "mine" / "bin").mkdir(parents=True)
    (tmp_path / "mine" / "bin" / "python").symlink_to(sys.executable)
    assert environment_python("tiny", tmp_path, locks) == tmp_path / "mine" / "bin" / "python"
    assert build("tiny", tmp_path, locks=locks) == tmp_path / "mine"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGLE3_ENV_TINY", "mine")
    assert environment_python("tiny", tmp_path, locks) == tmp_path / "mine" / "bin" / "python"


@pytest.mark.parametrize(
    ("folders", "carries", "fault"),
    [
        (["tiny_engine-1.2.3.dist-info"], "tiny-engine 1.2.3", ""),
        (["tiny_engine-1.2.3+cpu.dist-info"], "tiny-engine 1.2.3", ""),
        (["Tiny_Engine-1.2.3.dev4+gabc.dist-info"], "tiny-engine 1.2.3.dev4", ""),
        (["tiny-0.9+cpu.dist-info"], "tiny-engine 0.9", ""),  # built by hand, under the name that the alias gives it
        (["tiny_engine-1.2.3.dist-info", "tiny-1.2.3+cpu.dist-info"], "tiny-engine 1.2.3", ""),
        (["tiny_engine_extras-7.dist-info"], "no tiny-engine", "which holds 0 installations of tiny-engine"),
        (["tiny_engine-1.dist-info", "tiny_engine-2.dist-info"], "tiny-engine 1 and 2", "holds 2 installations"),
        (None, "no tiny-engine", "which has no bin/python"),
    ],
)
def test_an_environment_of_the_users_own_says_its_version_or_what_it_lacks(
    folders: list[str] | None, carries: str, fault: str, locks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = (locks / "environments.toml").read_text()
    described = re.sub('version_of = ".*"', 'version_of = "tiny-engine"', description)
    (locks / "environments.toml").write_text(described + '\nalias = { tiny = ["tiny-engine", "1.2.3+cpu"] }\n')
    mine = tmp_path / "mine"
    monkeypatch.setenv("EAGLE3_ENV_TINY", str(mine))
    for name in folders or []:
        (mine / "lib" / "python3.12" / "site-packages" / name).mkdir(parents=True)
    if folders is not None:
        (mine / "bin").mkdir()
        (mine / "bin" / "python").symlink_to(sys.executable)
    [item] = status(tmp_path, locks)
    assert item.carries == carries
    assert fault in item.fault
    assert bool(item.fault) == bool(fault)
    assert item.path == mine
    assert item.built == (folders is not None)
    assert "unknown" not in item.carries + item.version


def test_unknown_name_and_full_disk_are_refused(locks: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBuildError, match="no environment 'granite'.*one of tiny"):
        build("granite", tmp_path, locks=locks)
    (locks / "environments.toml").write_text(TINY.replace("0.001", "1e9"))
    with pytest.raises(EnvironmentBuildError, match="GB free.*EAGLE3_CACHE_DIR"):
        build("tiny", tmp_path, locks=locks)


def test_other_machines_and_pythons_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_machine()
    with monkeypatch.context() as patch:
        patch.setattr(environments.platform, "machine", lambda: "aarch64")
        with pytest.raises(EnvironmentBuildError, match="aarch64.*Linux on x86_64"):
            check_machine()
    with monkeypatch.context() as patch:
        patch.setattr(environments.sys, "version_info", (3, 14, 0))
        with pytest.raises(EnvironmentBuildError, match=r"Python 3.11 or 3.12"):
            check_machine()


@pytest.mark.parametrize("name", sorted(descriptions()))
def test_lock_files_pin_every_package_once(name: str) -> None:
    description = descriptions()[name]
    for file in (*description.locks, *description.torch):
        lines = [line for line in (LOCKS / file).read_text().splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines), file
        assert len(pins(LOCKS / file)) == len(lines), f"a package is twice in {file}"
    together = [package for file in description.locks for package in pins(LOCKS / file)]
    for file in description.torch:
        assert not set(together) & set(pins(LOCKS / file)), f"{file} and {description.locks} pin the same package"
    assert description.version_of in together


def test_key_follows_the_lock_files(locks: Path) -> None:
    before = environment_key(descriptions(locks)["tiny"], locks)
    assert environment_key(descriptions(locks)["tiny"], locks) == before
    (locks / "tiny.txt").write_text("pebble==1.6\n")
    after = environment_key(descriptions(locks)["tiny"], locks)
    (locks / "environments.toml").write_text(TINY + 'proof = "import pebble"')
    assert len({before, after, environment_key(descriptions(locks)["tiny"], locks)}) == 3
