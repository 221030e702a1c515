"""A machine of its own for a test: state folder, target, journal of the stand-in; everything by environment."""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from prefect.settings import PREFECT_API_URL
from prefect.testing.utilities import prefect_test_harness
from standin.tiny import NAME, small_round, tiny_target, write_prompts

from infra.config.load import build_round
from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.round.context import RoundContext

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Machine:
    """A test's machine.

    Attributes:
        folder: holds ``state`` and the journal.
        fields: the small round's fields.
    """

    folder: Path
    fields: dict[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to work on this machine."""
        return {
            "EAGLE3_STATE_DIR": str(self.folder / "state"),
            "EAGLE3_CACHE_DIR": str(self.folder / "cache"),
            "EAGLE3_ENV_VLLM_CPU": sys.prefix,
            "STANDIN_JOURNAL": str(self.journal),
            "OMP_NUM_THREADS": "1",
        }

    @property
    def journal(self) -> Path:
        """What the stand-in did here."""
        return self.folder / "journal.jsonl"

    def enter(self, patch: pytest.MonkeyPatch) -> Self:
        """Make this process work on this machine."""
        for name, value in self.environment.items():
            patch.setenv(name, value)
        return self

    def config(self, **overrides: Any) -> RoundConfig:
        """The small round; overrides by dotted name with ``__`` for the dot."""
        return build_round(self.fields, {name.replace("__", "."): value for name, value in overrides.items()})

    def round(self, **overrides: Any) -> RoundContext:
        """The round as a process on this machine sees it (its environment must be set)."""
        return RoundContext(self.config(**overrides), Settings())

    def events(self) -> list[dict[str, Any]]:
        """The journal's lines."""
        return [json.loads(line) for line in self.journal.read_text().splitlines()] if self.journal.exists() else []

    def launches(self) -> Counter[str]:
        """Servers launched, by profile."""
        return Counter(event["launch"] for event in self.events() if "launch" in event)

    def requests(self, kind: str) -> Counter[str]:
        """Completions asked for, by prompt."""
        return Counter(event["prompt"] for event in self.events() if event.get("request") == kind)

    def forget(self) -> None:
        """Begin the journal anew."""
        self.journal.unlink(missing_ok=True)

    def written(self, *steps: str) -> dict[str, tuple[int, int]]:
        """(inode, mtime) of the small round's files of these steps, by path."""
        root = self.folder / "state" / "store" / "rounds" / self.fields["name"]
        found = [path for step in steps for path in (root / step).glob("*/**/*") if path.is_file()]
        return {str(path.relative_to(root)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}

    def copy(self, folder: Path) -> "Machine":
        """The same machine once more, with all it holds."""
        shutil.copytree(self.folder / "state", folder / "state", ignore=shutil.ignore_patterns("run"))
        return Machine(folder, self.fields)


Use = Callable[[Machine], Machine]
"""Makes the test's process work on a machine."""


def new_machine(folder: Path) -> Machine:
    """A machine with the tiny target and nothing else."""
    tiny_target(folder / "state" / "models" / NAME)
    return Machine(folder, small_round(*write_prompts(folder)))


def prefect_server() -> Iterator[str]:
    """A temporary Prefect server; yields its URL, which child processes take as ``PREFECT_API_URL``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        with prefect_test_harness(server_startup_timeout=600):
            yield str(PREFECT_API_URL.value())
