"""What each environment is: ``locks/environments.toml`` and the lock files it names. Standard library only."""

import hashlib
import json
import sys
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.errors import EnvironmentBuildError

LOCKS = Path(__file__).resolve().parent / "locks"


@dataclass(frozen=True)
class Description:
    """One environment as ``environments.toml`` describes it.

    Args:
        name: its name, e.g. ``vllm-cpu``.
        about: what it is for.
        version_of: the distribution whose version is shown as the environment's.
        locks: lock files, every package pinned, none resolved.
        torch: lock files for torch, best first; the first that pip can find is taken.
        alias: distribution name -> (installed distribution, version): metadata under a second name.
        proof: Python statements that must run in it before it counts as built.
        gigabytes: disk it needs, 10^9 bytes.
    """

    name: str
    about: str
    version_of: str
    locks: tuple[str, ...]
    torch: tuple[str, ...]
    alias: dict[str, tuple[str, str]]
    proof: str
    gigabytes: float


def descriptions(locks: Path = LOCKS) -> dict[str, Description]:
    """Every environment in ``locks/environments.toml``, by name."""
    tables = tomllib.loads((locks / "environments.toml").read_text())
    return {
        name: Description(
            name=name,
            about=table["about"],
            version_of=table["version_of"],
            locks=tuple(table["locks"]),
            torch=tuple(table.get("torch", ())),
            alias={alias: (of, version) for alias, (of, version) in table.get("alias", {}).items()},
            proof=table.get("proof", ""),
            gigabytes=float(table["gigabytes"]),
        )
        for name, table in tables.items()
    }


def describe(name: str, locks: Path = LOCKS) -> Description:
    """The environment called ``name``.

    Raises:
        EnvironmentBuildError: there is none of that name.
    """
    known = descriptions(locks)
    if name not in known:
        raise EnvironmentBuildError(f"there is no environment {name!r}", expected=f"one of {', '.join(known)}")
    return known[name]


def pins(lock: Path) -> dict[str, str]:
    """Distribution -> version of a lock file; names in lower case with dashes."""
    lines = (line.split("#")[0].split(";")[0].strip() for line in lock.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {name.strip().lower().replace("_", "-"): version.strip() for name, version in pairs}


def environment_key(description: Description, locks: Path = LOCKS) -> str:
    """12 hex digits: description, lock files and this Python's version decide them."""
    digest = hashlib.sha256(json.dumps(asdict(description), sort_keys=True).encode())
    for file in (*description.locks, *description.torch):
        digest.update(file.encode() + b"\0" + hashlib.sha256((locks / file).read_bytes()).digest())
    digest.update(f"python{sys.version_info[0]}.{sys.version_info[1]}".encode())
    return digest.hexdigest()[:12]
