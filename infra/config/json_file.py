"""Reading a JSON file of a target's folder."""

import json
from pathlib import Path
from typing import Any

from infra.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the target's folder.

    Raises:
        ConfigError: it cannot be read, or does not hold an object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds {type(found).__name__}", expected="a JSON object")
    return found
