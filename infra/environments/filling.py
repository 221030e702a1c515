"""Making one environment in its folder: virtual environment, torch, packages, proof, marker. Standard library only."""

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.environments.descriptions import Description, pins
from infra.environments.installing import InstallFailed, Uv, pip_install
from infra.environments.pip_settings import own_environment
from infra.errors import EnvironmentBuildError
from infra.units import size

log = logging.getLogger(__name__)

MARKER = "built.json"
"""Written last: an environment without it does not count."""
NO_TORCH = (
    "configure pip to find one of them: a find-links folder with the wheel, or PyTorch's own index of CPU builds as an "
    "extra index (pip config set global.extra-index-url URL; PyTorch's installation page names the URL)"
)


def check_disk(description: Description, folder: Path) -> None:
    """Refuse what does not fit.

    Raises:
        EnvironmentBuildError: the disk has less free than the environment needs.
    """
    free = shutil.disk_usage(folder.parent).free
    if free < description.gigabytes * 1e9:
        raise EnvironmentBuildError(
            f"environment {description.name} needs about {description.gigabytes:g} GB "
            f"and {folder.parent} has {size(free)} free",
            fix="make room, or set EAGLE3_CACHE_DIR to a folder on a larger disk",
        )


def fill(folder: Path, description: Description, locks: Path, uv: Uv | None, held: int) -> None:
    """Make the environment in its final place, which its scripts name; the marker comes last.

    Args:
        folder: where; must not exist.
        description: what is in it.
        locks: folder of the lock files.
        uv: what installs; None lets pip do it.
        held: descriptor of the environment's lock; every child keeps it open, so the lock outlives a killed builder.

    Raises:
        EnvironmentBuildError: packages are not to be had, or what they make does not run.
    """
    name = description.name
    began = time.monotonic()
    log.info(f"{name}: building into {folder} ({description.about})")
    _step([sys.executable, "-m", "venv", "--without-pip", str(folder)], f"{name}: python -m venv failed", held)
    python = folder / "bin" / "python"
    torch = _install_torch(python, description, locks, uv, held)
    for file in description.locks:
        try:
            what = f"{name}: {len(pins(locks / file))} packages of {file}"
            _install(python, locks / file, what, uv, held)
        except InstallFailed as error:
            raise EnvironmentBuildError(f"environment {name}: pip could not install {file}: {error}") from error
    for alias, (distribution, version) in description.alias.items():
        _write_alias(folder, alias, distribution, version)
    if description.proof:
        _step([str(python), "-I", "-c", description.proof], f"{name}: installed, but does not run", held)
    seconds = time.monotonic() - began
    used = _disk_use(folder)
    python_version = platform.python_version()
    _write_marker(
        folder, {"name": name, "seconds": round(seconds, 1), "bytes": used, "torch": torch, "python": python_version}
    )
    log.info(f"{name}: built in {seconds:.0f} s, {size(used)}")


def _install_torch(python: Path, description: Description, locks: Path, uv: Uv | None, held: int) -> str:
    """Install the first torch that is to be had; returns its lock file's name ("" when none is asked for)."""
    missing: list[str] = []
    for file in description.torch:
        wanted = f"torch=={pins(locks / file)['torch']}"
        try:
            _install(python, locks / file, f"{description.name}: {wanted}", uv, held)
        except InstallFailed as error:
            if not error.not_found:
                raise EnvironmentBuildError(
                    f"environment {description.name}: pip could not install {wanted}: {error}"
                ) from error
            missing.append(f"{wanted}: {error.reason}")
            log.info(f"{description.name}: pip finds no {wanted} here ({error.reason})")
        else:
            return file
    if missing:
        raise EnvironmentBuildError(
            f"environment {description.name}: no torch to be had here ({'; '.join(missing)})", fix=NO_TORCH
        )
    return ""


def _install(python: Path, lock: Path, what: str, uv: Uv | None, held: int) -> None:
    """Install what a lock file pins by uv; by pip where there is no uv, or where uv fails.

    pip is asked again because it may reach what uv cannot: it has more kinds of settings, and knows more of them.

    Raises:
        InstallFailed: pip failed too.
    """
    if uv is not None:
        try:
            return uv.install(python, lock, what, held)
        except InstallFailed as error:
            log.info(f"{what}: uv failed ({error.reason}); trying pip")
    if not python.with_name("pip3").exists():
        _step([str(python), "-I", "-m", "ensurepip"], f"{what}: python -m ensurepip failed", held)
    return pip_install(python, lock, what, held)


def _step(command: Sequence[str], failure: str, held: int) -> None:
    """Run a short command; its last lines are the error's text."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=own_environment(),
        pass_fds=(held,),
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.strip().splitlines()[-15:])
        raise EnvironmentBuildError(f"{failure} (exit {done.returncode}):\n{tail}\n")


def _write_alias(folder: Path, alias: str, distribution: str, version: str) -> None:
    """Metadata under a second name, for code that asks for its version; entry points stay with the first name."""
    packages = next((folder / "lib").glob("python3.*/site-packages"))
    info = packages / f"{alias}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {alias}\nVersion: {version}\nSummary: Another name of {distribution}\n"
    )
    (info / "INSTALLER").write_text("eagle3\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")))


def _disk_use(folder: Path) -> int:
    """Bytes of the files in ``folder``, links not followed."""
    return sum(os.lstat(os.path.join(root, file)).st_size for root, _, files in os.walk(folder) for file in files)


def _write_marker(folder: Path, made: dict[str, Any]) -> None:
    temporary = folder / f".{MARKER}.new"
    with temporary.open("w") as stream:
        json.dump(made, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(folder / MARKER)
