"""Versions of what is installed in another Python environment, from its metadata. Standard library only."""

from collections.abc import Sequence
from pathlib import Path


def installed(folder: Path, names: Sequence[str]) -> list[str]:
    """Versions of one distribution in an environment, without local build tags; only names of folders are read.

    Args:
        folder: the environment's folder, the one with ``bin/python`` in it.
        names: what the distribution may be called there, with dashes and best first; the first that is there counts.

    Returns:
        A version for each installation of it; empty when there is none.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("lib/python3*/site-packages/*.dist-info")):
        name, _, version = path.name.removesuffix(".dist-info").partition("-")
        found.setdefault(name.lower().replace("_", "-"), []).append(version.split("+")[0])
    return next((found[name] for name in names if name in found), [])
