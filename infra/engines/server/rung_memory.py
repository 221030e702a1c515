"""Which rung of a ladder worked here before, so that the next start begins with it."""

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.config.round import RungConfig
from infra.machine.learnt import amend, recall


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
        known = self._known(recall(self.path))
        return known.get(purpose) or next(reversed(known.values()), None)

    def keep(self, purpose: str, rung: str) -> None:
        """Note a rung that came up."""

        def note(everything: dict[str, Any]) -> None:
            known = self._known(everything)
            known.pop(purpose, None)
            everything[self._key] = {**known, purpose: rung}

        amend(self.path, note)

    def _known(self, everything: dict[str, Any]) -> dict[str, str]:
        """Rung by purpose, the one that came up last at the end."""
        found = everything.get(self._key)
        known = found.items() if isinstance(found, dict) else ()
        return {purpose: rung for purpose, rung in known if isinstance(rung, str)}

    @property
    def _key(self) -> str:
        rungs = json.dumps([rung.model_dump(mode="json") for rung in self.ladder], sort_keys=True)
        ladder = hashlib.sha256(rungs.encode()).hexdigest()[:12]
        return f"{platform.node()} | {self.engine} | {self.target} | ladder {ladder}"
