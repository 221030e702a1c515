"""Building environments: once, whole or not at all. The packages are wheels made here; no index is asked."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from standin.waiting import wait_for

from infra.environments.building import build, default_cache, environment_python, status
from infra.errors import EnvironmentBuildError

CHECKOUT = Path(__file__).resolve().parents[2]
BUILDER = """
import logging
import sys
from pathlib import Path
from infra.environments.building import build
logging.basicConfig(level=logging.INFO, format="said: %(message)s", stream=sys.stdout)
print(build("tiny", Path(sys.argv[1]), Path(sys.argv[2])))
"""


def make_wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n")


@pytest.fixture(scope="module")
def uv_environment() -> Path:
    """The environment with uv that this machine's environments were built by."""
    try:
        return build("uv", default_cache())
    except EnvironmentBuildError as error:
        pytest.skip(f"no uv here: {error}")


@pytest.fixture(params=["uv", "pip"])
def installer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What installs: uv, or pip where uv is not to be had."""
    name: str = request.param
    if name == "uv":
        monkeypatch.setenv("EAGLE3_ENV_UV", str(request.getfixturevalue("uv_environment")))
    else:
        monkeypatch.delenv("EAGLE3_ENV_UV", raising=False)
    return name


@pytest.fixture
def locks(tmp_path: Path, installer: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock folder with one environment `tiny`, and pip pointed at wheels made here and at nothing else."""
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "pebble", "1.5")
    make_wheel(wheels, "torch", "2.0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.delenv("EAGLE3_ENV_TINY", raising=False)
    folder = tmp_path / "locks"
    folder.mkdir()
    (folder / "tiny.txt").write_text("# one package\npebble==1.5\n")
    (folder / "torch-rare.txt").write_text("torch==2.0+rare\n")
    (folder / "torch-plain.txt").write_text("torch==2.0\n")
    describe_tiny(folder)
    return folder


def describe_tiny(locks: Path, torch: tuple[str, ...] = (), proof: str = "import pebble") -> None:
    (locks / "environments.toml").write_text(
        f"""
        [tiny]
        about = "a test"
        version_of = "pebble"
        locks = ["tiny.txt"]
        torch = {json.dumps(torch)}
        alias = {{ stone = ["pebble", "1.5+alias"] }}
        proof = {json.dumps(proof)}
        gigabytes = 0.001
        """
    )


def run_in(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.long
def test_build_installs_exactly_what_is_pinned_and_only_once(
    locks: Path, installer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    describe_tiny(locks, torch=("torch-rare.txt", "torch-plain.txt"))
    cache = tmp_path / "cache"

    assert [item.built for item in status(cache, locks)] == [False]
    with pytest.raises(EnvironmentBuildError, match="eagle3 engines install tiny"):
        environment_python("tiny", cache, locks)

    folder = build("tiny", cache, locks)
    said = caplog.messages

    python = environment_python("tiny", cache, locks)
    assert python == folder / "bin" / "python"
    assert run_in(python, "import pebble, torch; print(pebble.version, torch.version)") == "1.5 2.0"
    assert run_in(python, "from importlib.metadata import version; print(version('stone'))") == "1.5+alias"
    made = json.loads((folder / "built.json").read_text())
    assert made["torch"] == "torch-plain.txt"
    assert any("finds no torch==2.0+rare" in line for line in said), "the choice of the second torch is said"
    assert sum(bool(re.match("uv is not to be had here, so pip installs.*No matching", line)) for line in said) == (
        installer == "pip"
    )
    assert sum("uv failed" in line for line in said) == (installer == "uv"), "at torch==2.0+rare, and nowhere else"
    (item,) = status(cache, locks)
    assert (item.built, item.version, item.path, item.bytes) == (True, "1.5", folder, made["bytes"])

    caplog.clear()
    assert build("tiny", cache, locks) == folder
    assert caplog.messages == []

    (locks / "tiny.txt").write_text("pebble==1.6\n")
    with pytest.raises(EnvironmentBuildError, match="not built"):
        environment_python("tiny", cache, locks)


@pytest.mark.long
@pytest.mark.parametrize(
    ("lock", "torch", "proof", "words"),
    [
        ("pebble==9.9\n", (), "", "No matching distribution found for pebble==9.9"),
        ("pebble==1.5\n", ("torch-rare.txt",), "", "torch==2.0+rare.*PyTorch's own index of CPU builds"),
        ("pebble==1.5\n", (), "import granite", "does not run.*No module named 'granite'"),
    ],
    ids=["missing-package", "no-torch", "does-not-import"],
)
def test_failed_build_says_why_and_leaves_nothing(
    locks: Path, tmp_path: Path, lock: str, torch: tuple[str, ...], proof: str, words: str
) -> None:
    (locks / "tiny.txt").write_text(lock)
    describe_tiny(locks, torch, proof)

    with pytest.raises(EnvironmentBuildError) as raised:
        build("tiny", tmp_path / "cache", locks)

    assert re.search(words.replace("+", r"\+"), str(raised.value), re.DOTALL)
    assert {path.suffix for path in (tmp_path / "cache" / "envs").iterdir()} == {".lock"}


def start_builder(cache: Path, locks: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(cache), str(locks)]
    return subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_killed_build_is_redone_by_one_of_two_builders(locks: Path, tmp_path: Path) -> None:
    cache, reached, go_on = tmp_path / "cache", tmp_path / "reached", tmp_path / "go_on"
    wait = f"import os, time\nopen({str(reached)!r}, 'w').close()\n"
    wait += f"while not os.path.exists({str(go_on)!r}): time.sleep(0.02)"
    describe_tiny(locks, proof=wait)

    first = start_builder(cache, locks)
    wait_for(reached.exists, "the packages are installed")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert [item.built for item in status(cache, locks)] == [False], "all packages are there, and yet it is not built"

    # The killed builder's child still runs in the folder: nobody may touch it until that child is gone.
    others = [start_builder(cache, locks), start_builder(cache, locks)]
    assert all(other.stdout is not None and "waiting" in other.stdout.readline() for other in others)
    go_on.touch()
    outputs = [other.communicate(timeout=120)[0] for other in others]

    assert [other.returncode for other in others] == [0, 0], outputs
    assert sum("removing what an interrupted build left" in text for text in outputs) == 1
    assert sum("built in" in text for text in outputs) == 1
    assert len({text.splitlines()[-1] for text in outputs}) == 1
    assert run_in(environment_python("tiny", cache, locks), "import pebble; print(pebble.version)") == "1.5"


@pytest.mark.parametrize("installer", ["uv"], indirect=True)
def test_what_a_killed_builder_was_installing_with_keeps_the_lock(
    uv_environment: Path, locks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, reached, go_on = tmp_path / "cache", tmp_path / "reached", tmp_path / "go_on"
    slow = tmp_path / "slow" / "bin"
    slow.mkdir(parents=True)
    for name, command in {
        "python": f'exec {uv_environment}/bin/python "$@"',
        "uv": f'touch {reached}; while ! test -e {go_on}; do sleep 0.02; done; exec {uv_environment}/bin/uv "$@"',
    }.items():
        (slow / name).write_text(f"#!/bin/sh\n{command}\n")
        (slow / name).chmod(0o755)
    monkeypatch.setenv("EAGLE3_ENV_UV", str(slow.parent))

    first = start_builder(cache, locks)
    wait_for(reached.exists, "uv has been started")
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = start_builder(cache, locks)
    assert second.stdout is not None
    assert "waiting" in second.stdout.readline()
    go_on.touch()
    said = second.communicate(timeout=120)[0]

    assert second.returncode == 0, said
    assert "removing what an interrupted build left" in said
    assert run_in(environment_python("tiny", cache, locks), "import pebble; print(pebble.version)") == "1.5"


@pytest.mark.parametrize("installer", ["uv"], indirect=True)
def test_uv_finds_packages_where_pips_files_say(
    locks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nno-index = yes\nfind-links = /nowhere\n[install]\nfind-links = gone\n  ~/wheels\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UV_PYTHON", "3.9")
    monkeypatch.setenv("UV_SYSTEM_PYTHON", "1")

    folder = build("tiny", tmp_path / "cache", locks)

    assert run_in(folder / "bin" / "python", "import pebble; print(pebble.version)") == "1.5"
    assert not any("pip" in line for line in caplog.messages), caplog.messages
    assert run_in(folder / "bin" / "python", "import importlib.util; print(importlib.util.find_spec('pip'))") == "None"
