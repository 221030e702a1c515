"""The Python environments: what is in each, where it lies, building it once.

Runs under a bare Python, before anything is installed: standard library only.

    python -m infra.environments build NAME...    build what is missing; prints each environment's Python
    python -m infra.environments status           what there is

``locks/environments.toml`` describes them. An environment lies in ``<cache>/envs/<name>-<key>``, where the key is
the hash of its description, its lock files and the Python version: a changed lock file makes a new one beside it.
It counts as built when, and only when, ``built.json`` is in it, and that is written last.
``EAGLE3_ENV_<NAME>`` (``EAGLE3_ENV_VLLM_CPU``) names a folder to use in its place.

uv installs the packages. It has an environment of its own (``uv``), which pip makes before the first other one; its
cache is ``<cache>/uv``, and the files of environments are hard links into it. Where uv is not to be had, or fails at
a lock file, pip installs, and that is said.
"""

import argparse
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.environments.descriptions import LOCKS, Description, describe, descriptions, environment_key, pins
from infra.environments.filling import MARKER, check_disk, fill
from infra.environments.installing import InstallFailed, Uv
from infra.environments.metadata import installed
from infra.errors import EnvironmentBuildError
from infra.machine.locks import exclusive
from infra.units import size

log = logging.getLogger(__name__)

PYTHONS = ((3, 11), (3, 12))
UV = "uv"
_no_uv: set[Path] = set()
"""Cache folders for which this process has said that uv is not to be had."""


@dataclass(frozen=True)
class Status:
    """What there is of one environment: ``bytes`` on disk when built, else 0; ``fault`` of a user's own, a sentence."""

    name: str
    key: str
    built: bool
    path: Path
    bytes: int
    package: str
    version: str
    about: str
    fault: str = ""

    @property
    def carries(self) -> str:
        """The package that it is for and its version, e.g. ``vllm 0.32.0``."""
        return f"{self.package} {self.version}" if self.version else f"no {self.package}"


def default_cache() -> Path:
    """``EAGLE3_CACHE_DIR``, else ``~/.cache/eagle3``: the same rule as the settings."""
    return Path(os.environ.get("EAGLE3_CACHE_DIR") or Path.home() / ".cache" / "eagle3").absolute()


def environment_folder(name: str, cache_dir: Path, locks: Path = LOCKS) -> Path:
    """Where the environment lies or would lie, absolute: engines run elsewhere. ``EAGLE3_ENV_<NAME>`` comes first."""
    instead = os.environ.get(_override(name))
    if instead:
        return Path(instead).absolute()
    return cache_dir / "envs" / f"{name}-{environment_key(describe(name, locks), locks)}"


def environment_python(name: str, cache_dir: Path, locks: Path = LOCKS) -> Path:
    """The environment's Python.

    Raises:
        EnvironmentBuildError: it is not built, or ``EAGLE3_ENV_<NAME>`` names a folder without a Python.
    """
    folder = environment_folder(name, cache_dir, locks)
    python = folder / "bin" / "python"
    if os.environ.get(_override(name)):
        if not python.exists():
            raise EnvironmentBuildError(f"{_override(name)} names {folder}, which has no bin/python")
    elif not _built(folder):
        raise EnvironmentBuildError(f"environment {name} is not built", fix=f"eagle3 engines install {name}")
    return python


@contextmanager
def using_environment(name: str, folder: str) -> Iterator[None]:
    """Let ``folder`` be the environment ``name`` in this process for a while, as ``EAGLE3_ENV_<NAME>`` does.

    With an empty ``folder`` nothing changes.
    """
    variable = _override(name)
    before = os.environ.get(variable)
    if folder:
        os.environ[variable] = folder
    try:
        yield
    finally:
        if before is not None:
            os.environ[variable] = before
        elif folder:
            os.environ.pop(variable, None)


def build(name: str, cache_dir: Path, locks: Path = LOCKS) -> Path:
    """Build the environment unless it is there; returns its folder.

    Of two builders at once one builds and the other waits and takes the result. What an interrupted build left
    is removed first.

    Raises:
        EnvironmentBuildError: this machine cannot have it, or its packages are not to be had; nothing is left of it.
    """
    description = describe(name, locks)
    if os.environ.get(_override(name)):
        return environment_python(name, cache_dir, locks).parents[1]
    folder = environment_folder(name, cache_dir, locks)
    if _built(folder):
        return folder
    check_machine()
    lock_file = folder.with_name(folder.name + ".lock")
    with exclusive(lock_file, lambda: log.info(f"{name}: another process is building it; waiting")) as held:
        if _built(folder):
            return folder
        if folder.exists():
            log.info(f"{name}: removing what an interrupted build left")
            shutil.rmtree(folder)
        check_disk(description, folder)
        try:
            fill(folder, description, locks, None if name == UV else _find_uv(cache_dir), held)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder


def status(cache_dir: Path, locks: Path = LOCKS) -> list[Status]:
    """What there is of every environment."""
    return [_status(description, cache_dir, locks) for description in descriptions(locks).values()]


def check_machine() -> None:
    """Refuse what the lock files were not made for.

    Raises:
        EnvironmentBuildError: not Linux on x86-64, or a Python other than 3.11 and 3.12.
    """
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise EnvironmentBuildError(
            f"this is {system} on {machine}", expected="Linux on x86_64, for which the packages are pinned"
        )
    if sys.version_info[:2] not in PYTHONS:
        raise EnvironmentBuildError(
            f"this is Python {platform.python_version()}",
            expected="Python 3.11 or 3.12",
            fix="install one of them and put it first on PATH",
        )


def _override(name: str) -> str:
    return f"EAGLE3_ENV_{name.upper().replace('-', '_')}"


def _built(folder: Path) -> bool:
    return _made(folder) is not None and (folder / "bin" / "python").exists()


def _made(folder: Path) -> dict[str, Any] | None:
    """What the marker says; None when there is none, or a damaged one."""
    try:
        made = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return made if isinstance(made, dict) else None


def _status(description: Description, cache_dir: Path, locks: Path) -> Status:
    name = description.name
    folder = environment_folder(name, cache_dir, locks)
    if os.environ.get(_override(name)):
        return _status_instead(description, folder)
    made = _made(folder) or {}
    return Status(
        name=name,
        key=environment_key(description, locks),
        built=_built(folder),
        path=folder,
        bytes=int(made.get("bytes", 0)),
        package=description.version_of,
        version=pins(locks / description.locks[0])[description.version_of],
        about=description.about,
    )


def _status_instead(description: Description, folder: Path) -> Status:
    """Of a folder that the user put in the environment's place: what its own metadata says."""
    package, variable = description.version_of, _override(description.name)
    built = (folder / "bin" / "python").exists()
    versions = installed(folder, (package, *description.alias))
    wrong = f"holds {len(versions)} installations of {package}" if built else "has no bin/python"
    fault = f"{variable} names {folder}, which {wrong}" if not built or len(versions) != 1 else ""
    return Status(
        name=description.name,
        key="override",
        built=built,
        path=folder,
        bytes=0,
        package=package,
        version=" and ".join(versions),
        about=description.about,
        fault=fault,
    )


def _find_uv(cache_dir: Path) -> Uv | None:
    """uv, built first where it is missing; None, and said once, where it is not to be had."""
    if cache_dir in _no_uv:
        return None
    try:
        return Uv.beside_pip(build(UV, cache_dir) / "bin" / "python", cache_dir / "uv")
    except (EnvironmentBuildError, InstallFailed) as error:
        _no_uv.add(cache_dir)
        cause = error.__cause__
        reason = cause.reason if isinstance(cause, InstallFailed) else error
        log.info(f"uv is not to be had here, so pip installs, which takes longer: {reason}")
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m infra.environments")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("build", help="build what is missing").add_argument("names", nargs="+", metavar="NAME")
    verbs.add_parser("status", help="what there is")
    options = parser.parse_args(arguments)
    cache_dir = default_cache()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if options.verb == "build":
            for name in options.names:
                print(build(name, cache_dir) / "bin" / "python")
        else:
            for item in status(cache_dir):
                state = "fault" if item.fault else "built" if item.built else "not built"
                print(f"{item.name:12} {state:10} {item.carries:24} {size(item.bytes):>8}  {item.path}")
    except EnvironmentBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing is left that counts as built", file=sys.stderr)
        return 130
    return 0
