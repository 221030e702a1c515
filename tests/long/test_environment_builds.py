"""Building environments: once, whole or not at all. The packages are wheels made here; no index is asked."""

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from standin.waiting import wait_for

from infra.environments.building import build, environment_python, status
from infra.errors import EnvironmentBuildError

CHECKOUT = Path(__file__).resolve().parents[2]
BUILDER = """
import sys
from pathlib import Path
from infra.environments.building import build
print(build("tiny", Path(sys.argv[1]), locks=Path(sys.argv[2]), say=lambda line: print("said:", line, flush=True)))
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


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def test_build_installs_exactly_what_is_pinned_and_only_once(locks: Path, tmp_path: Path) -> None:
    describe_tiny(locks, torch=("torch-rare.txt", "torch-plain.txt"))
    cache, said = tmp_path / "cache", list[str]()

    assert [item.built for item in status(cache, locks)] == [False]
    with pytest.raises(EnvironmentBuildError, match="eagle3 engines install tiny"):
        environment_python("tiny", cache, locks)

    folder = build("tiny", cache, said.append, locks)

    python = environment_python("tiny", cache, locks)
    assert python == folder / "bin" / "python"
    assert run_in(python, "import pebble, torch; print(pebble.version, torch.version)") == "1.5 2.0"
    assert run_in(python, "from importlib.metadata import version; print(version('stone'))") == "1.5+alias"
    made = json.loads((folder / "built.json").read_text())
    assert made["torch"] == "torch-plain.txt"
    assert any("finds no torch==2.0+rare" in line for line in said), "the choice of the second torch is said"
    (item,) = status(cache, locks)
    assert (item.built, item.version, item.path, item.bytes) == (True, "1.5", folder, made["bytes"])

    said.clear()
    assert build("tiny", cache, said.append, locks) == folder
    assert said == []

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
        build("tiny", tmp_path / "cache", lambda line: None, locks)

    assert re.search(words.replace("+", r"\+"), str(raised.value), re.DOTALL)
    assert [path.suffix for path in (tmp_path / "cache" / "envs").iterdir()] == [".lock"]


def test_killed_build_is_redone_by_one_of_two_builders(locks: Path, tmp_path: Path) -> None:
    cache, reached, go_on = tmp_path / "cache", tmp_path / "reached", tmp_path / "go_on"
    wait = f"import os, time\nopen({str(reached)!r}, 'w').close()\n"
    wait += f"while not os.path.exists({str(go_on)!r}): time.sleep(0.02)"
    describe_tiny(locks, proof=wait)

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BUILDER, str(cache), str(locks)]
        return subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    first = start()
    wait_for(reached.exists, "the packages are installed")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert [item.built for item in status(cache, locks)] == [False], "all packages are there, and yet it is not built"

    # The killed builder's child still runs in the folder: nobody may touch it until that child is gone.
    others = [start(), start()]
    assert all(other.stdout is not None and "waiting" in other.stdout.readline() for other in others)
    go_on.touch()
    outputs = [other.communicate(timeout=120)[0] for other in others]

    assert [other.returncode for other in others] == [0, 0], outputs
    assert sum("removing what an interrupted build left" in text for text in outputs) == 1
    assert sum("built in" in text for text in outputs) == 1
    assert len({text.splitlines()[-1] for text in outputs}) == 1
    assert run_in(environment_python("tiny", cache, locks), "import pebble; print(pebble.version)") == "1.5"
