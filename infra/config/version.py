"""Versions of engines: read, compared, written."""

from infra.errors import ConfigError

Version = tuple[int, int, int]


def read_version(version: str) -> Version:
    """(major, minor, patch) of a version such as "0.5.12.post1"; what follows the patch level is not compared.

    Raises:
        ConfigError: it does not begin with three numbers.
    """
    parts = version.split(".")
    if len(parts) < 3 or not all(part.isdigit() for part in parts[:3]):
        raise ConfigError(f"the engine version {version!r} cannot be read", expected="a version like 0.32.0")
    return int(parts[0]), int(parts[1]), int(parts[2])


def dotted(version: Version) -> str:
    """A version as people write it, e.g. 0.5.23; an open patch level (999) is left out."""
    return ".".join(str(part) for part in version if part != 999)
