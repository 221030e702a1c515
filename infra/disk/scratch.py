"""What lies in the rounds' scratch folders, and whether anybody goes on with it."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from infra.config.round import ENGINES
from infra.disk.item import Item, remove
from infra.errors import StoreError
from infra.machine.host import folder_bytes
from infra.results import TRAINING
from infra.store.answers import DONE
from infra.store.objects import ObjectStore
from infra.store.rounds import whole

NOBODYS: dict[str, str] = dict.fromkeys(ENGINES, "a copy of a draft, made again when needed") | {
    "staging": "staging of a dead engine",
    "draft": "a copy of a draft, made again when needed",
    "walk": "a prediction's working folder",
    "reference": "a dead reference's working folder",
    "front": "a dead front's working folder",
}
"""What nobody goes on with, by the first word of its name, and what it is."""


def in_scratch(store: ObjectStore, folder: Path, busy: bool) -> Iterator[Item]:
    """What lies in one round's scratch folder, which need not be there; all of a busy round's stays."""
    if busy:
        if size := folder_bytes(folder):
            yield Item(str(folder), size, f"{folder.name}: the round is being worked on", False, where="local")
        return
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        if size := folder_bytes(place):
            yield _item(store, folder.name, place, size)


def clean_scratch(store: ObjectStore, folder: Path) -> int:
    """Delete what a finished round leaves in its scratch; a training or answers of other settings stay. Bytes freed."""
    freed = remove(store, [_item(store, folder.name, place, 0) for place in sorted(folder.iterdir())])
    with suppress(OSError):  # it is not empty
        folder.rmdir()
    return freed


def _item(store: ObjectStore, name: str, place: Path, size: int) -> Item:
    """One file or folder of a round's scratch that no living process uses."""
    may_go, by_hand, why = _verdict(store, name, place)
    return Item(str(place), size, f"{name}: {why}", may_go, by_hand, where="local", round=name)


def _verdict(store: ObjectStore, name: str, place: Path) -> tuple[bool, bool, str]:
    """(may go, may be deleted by hand, why)."""
    kind, _, key = place.name.partition("-")
    if place.name == "front-dataset":  # `speculators generate-offline-data` puts a person's states into it
        return False, True, "a dataset for speculators' commands"
    if (why := NOBODYS.get(kind)) is not None:
        return True, False, why
    if kind == "train":
        if _draft_is_whole(store, name, key):
            return True, False, "checkpoints of a finished draft, which is in the store"
        return False, True, "a training that goes on from here"
    if kind == "answers":
        if store.exists(f"rounds/{name}/answers/{key.split('.')[0]}/{DONE}"):
            return True, False, "answers that are in the store"
        return False, False, "answers that are not in the store yet"
    return False, True, "not known to this version"


def _draft_is_whole(store: ObjectStore, name: str, key: str) -> bool:
    prefix = f"rounds/{name}/draft/{key}"
    try:
        made = json.loads(store.get(f"{prefix}/{TRAINING}"))
        return bool(made["files"]) and whole(store, prefix, made["files"], made.get("sizes", {}))
    except (StoreError, ValueError, LookupError, TypeError, AttributeError):
        return False
