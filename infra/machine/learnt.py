"""Small JSON files of what was learnt on this machine: they save time, and may be lost or damaged at any moment."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.machine.locks import exclusive
from infra.machine.processes.guard import write_private


def recall(path: Path) -> dict[str, Any]:
    """What the file holds; nothing when it is missing, cannot be read, or is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def amend(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the file holds, one process at a time; whole or not at all.

    Where it cannot be written (a full or read-only disk) nothing is kept, for no round may end on that.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(path.with_name(path.name + ".lock")):
            everything = recall(path)
            before = json.dumps(everything)
            change(everything)
            if json.dumps(everything) != before:
                write_private(path, json.dumps(everything, indent=1))
