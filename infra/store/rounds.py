"""Rounds in the store: a folder for each step and key, a pointer to the live one, and results read back if whole."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from infra.errors import StoreError
from infra.store.objects import ObjectMissing, ObjectStore

POINTER = "current.json"
PROVENANCE = "round.yaml"
Kind = TypeVar("Kind", bound=BaseModel)


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

    def write_provenance(self, facts: dict[str, Any]) -> None:
        """Keep what a start of the round was given (``round``, ``keys``, versions) in round.yaml."""
        path, text = f"{self.prefix}/{PROVENANCE}", yaml.safe_dump(facts, sort_keys=False).encode()
        if not self.store.exists(path) or self.store.get(path) != text:
            self.store.put(path, text)

    def provenance(self) -> dict[str, Any] | None:
        """What the last start of the round was given; None before the first one.

        Raises:
            StoreError: round.yaml is damaged.
        """
        path = f"{self.prefix}/{PROVENANCE}"
        try:
            facts = yaml.safe_load(self.store.get(path))
        except ObjectMissing:
            return None
        except (yaml.YAMLError, ValueError) as error:
            facts = str(error).splitlines()[0]
        if isinstance(facts, dict) and isinstance(facts.get("keys"), dict) and isinstance(facts.get("round"), dict):
            return facts
        raise StoreError(
            f"{path} is damaged: {facts!r:.200}", fix="delete it; the next run of the round writes it again"
        )


def read_stored(store: ObjectStore, path: str, kind: type[Kind]) -> Kind | None:
    """A stored result, or None when it is not there or not whole: it is made again then."""
    try:
        return kind.model_validate_json(store.get(path))
    except (ObjectMissing, ValueError):
        return None


def local_copy(store: ObjectStore, prefix: str, folder: Path) -> Path:
    """The folder of a prefix where the store is one on this machine, else ``folder`` with a copy of what is there."""
    local = store.local_path(prefix)
    if local is not None:
        return local
    for item in store.list(prefix):
        path = folder / item.path.removeprefix(prefix).lstrip("/")
        if not path.exists() or path.stat().st_size != item.size:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.get(item.path))
    return folder


def whole(store: ObjectStore, prefix: str, files: Iterable[str], sizes: Mapping[str, int]) -> bool:
    """Whether the files below a prefix are there, and as long as they were written, where that is known."""
    try:
        return all(sizes.get(name) in (None, store.size(f"{prefix}/{name}")) for name in files)
    except ObjectMissing:
        return False
