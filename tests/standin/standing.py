"""What the disk guard asks of a round, without a target or an engine."""

from pathlib import Path
from typing import Any

from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.disk.guard import DiskGuard
from infra.store.objects import ObjectStore
from infra.store.rounds import RoundStore

FIELDS: dict[str, Any] = {
    "name": "mine",
    "target": {"name": "t"},
    "extract": {"taps": [1]},
    "engines": {"vllm": {"device": "cpu"}},
    "retention": {"states": "until_published", "earlier_rounds": True},
}


class Standing:
    """The round ``mine``, with its state, store and scratch on one disk; ``changes`` replace fields of its config."""

    def __init__(self, disk: Path, **changes: Any) -> None:
        self.config = RoundConfig.model_validate({**FIELDS, **changes})
        self.settings = Settings(
            state_dir=disk / "state", store_url=f"file://{disk}/store", scratch_path=disk / "scratch"
        )
        self.store = ObjectStore(self.settings.store)
        self.rounds = RoundStore(self.store, "mine")
        self.scratch = self.settings.scratch_dir / "mine"
        self.scratch.mkdir(parents=True)
        self.keys = {"hidden": "now"}

    def prefix(self, step: str) -> str:
        """Folder of a step's live generation in the store."""
        return self.rounds.step_prefix(step, "now")

    def guard(self) -> DiskGuard:
        """Its disk guard."""
        return DiskGuard(
            self.store,
            self.settings,
            "mine",
            budget=self.config.budget,
            retention=self.config.retention,
            keys=lambda: self.keys,
        )
