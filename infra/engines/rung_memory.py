"""Which rung of a ladder worked here before, so that the next start begins with it."""

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.config.round import RungConfig
from infra.machine import guard
from infra.machine.filelock import exclusive


@dataclass(frozen=True)
class RungMemory:
    """What was learnt about one target under one engine version on this machine.

    Kept in ``<state>/rungs.json``, which may be deleted at any time: then ladders are tried from their first rung.

    Args:
        path: the file.
        engine: engine and version.
        target: name and revision of the target.
        ladder: the rungs as the round has them; a changed ladder is another one, about which nothing is known.
    """

    path: Path
    engine: str
    target: str
    ladder: Sequence[RungConfig]

    def recall(self, purpose: str) -> str | None:
        """The rung to begin with: the one that worked for this purpose, else the last one that worked for any."""
        known = _read(self.path).get(self._key, {})
        return known.get(purpose) or next(reversed(known.values()), None)

    def keep(self, purpose: str, rung: str) -> None:
        """Note a rung that came up; written whole or not at all."""
        with exclusive(self.path.with_name(self.path.name + ".lock")):
            everything = _read(self.path)
            known = everything.setdefault(self._key, {})
            if known.get(purpose) == rung and next(reversed(known)) == purpose:
                return
            known.pop(purpose, None)
            known[purpose] = rung
            self.path.with_name(self.path.name + ".tmp").unlink(missing_ok=True)
            guard.write_private(self.path, json.dumps(everything, indent=1))

    @property
    def _key(self) -> str:
        rungs = json.dumps([rung.model_dump(mode="json") for rung in self.ladder], sort_keys=True)
        ladder = hashlib.sha256(rungs.encode()).hexdigest()[:12]
        return f"{platform.node()} | {self.engine} | {self.target} | ladder {ladder}"


def _read(path: Path) -> dict[str, dict[str, str]]:
    """What is known; nothing when the file is missing or was damaged, since it only saves time."""
    try:
        found: Any = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
