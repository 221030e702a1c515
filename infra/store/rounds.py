"""Rounds in the store: a folder for each step and key, and a pointer to the live one."""

import json
from dataclasses import dataclass
from typing import Any

from infra.errors import StoreError
from infra.store.objects import ObjectMissing, ObjectStore

POINTER = "current.json"


@dataclass(frozen=True)
class Pointer:
    """The live result of a step.

    Attributes:
        key: key of the result.
        made: what made it: inputs, versions.
    """

    key: str
    made: dict[str, Any]


class RoundStore:
    """One round's part of a store.

    Args:
        round_name: name of the round.
    """

    def __init__(self, store: ObjectStore, round_name: str) -> None:
        self.store = store
        self.round_name = round_name
        self.prefix = f"rounds/{round_name}"

    def step_prefix(self, step: str, key: str) -> str:
        """Folder of a step's result."""
        return f"{self.prefix}/{step}/{key}"

    def current(self, step: str) -> Pointer | None:
        """The step's live result; None before the first one.

        Raises:
            StoreError: the pointer is damaged.
        """
        path = f"{self.prefix}/{step}/{POINTER}"
        try:
            raw = json.loads(self.store.get(path))
            return Pointer(str(raw["key"]), dict(raw["made"]))
        except ObjectMissing:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path} is damaged: {error}", fix="delete it; the next run of the round writes it again"
            ) from error

    def point(self, step: str, key: str, made: dict[str, Any]) -> None:
        """Make ``key`` the step's live result; written last, when the result verifies."""
        text = json.dumps({"key": key, "made": made}, indent=1, sort_keys=True)
        self.store.put(f"{self.prefix}/{step}/{POINTER}", text.encode())

    def keys(self, step: str) -> list[str]:
        """Keys of the step that have a folder, finished or not."""
        return self.store.folders(f"{self.prefix}/{step}")

    def write_round_yaml(self, text: str) -> None:
        """Keep the resolved round with versions and git revision, for provenance."""
        self.store.put(f"{self.prefix}/round.yaml", text.encode())
