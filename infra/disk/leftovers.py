"""What of this machine's scratch and shared memory may be deleted, and the clean-up of a whole machine."""

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.config.round import RetentionConfig
from infra.config.settings import Settings
from infra.disk.retention import Kept, Removal, kept, published, removable_by_itself, remove, temporaries
from infra.errors import ConfigError, StoreError
from infra.machine.host import folder_bytes
from infra.machine.segments import forget_segments, leftover_segments
from infra.results import TRAINING, whole
from infra.round.lock import is_busy, lock
from infra.store.answers import DONE
from infra.store.objects import ObjectStore

if TYPE_CHECKING:
    from infra.round.context import Round


@dataclass(frozen=True)
class Survey:
    """What a clean-up deletes, in its order, and what it leaves."""

    go: tuple[Removal, ...]
    stay: tuple[Kept, ...]


NOBODYS = {
    "staging": "staging of a dead engine",
    "draft": "a copy of a draft, made again when needed",
    "sglang": "a copy of a draft, made again when needed",
    "walk": "a prediction's working folder",
    "reference": "a dead reference's working folder",
    "front": "a dead front's working folder",
}
"""What nobody goes on with, by the first word of its name, and what it is."""


def survey(store: ObjectStore, settings: Settings, policies: Mapping[str, RetentionConfig]) -> Survey:
    """Look at the store, scratch and shared memory of this machine; changes nothing.

    Args:
        policies: retention by round, for the rounds whose policy is known.
    """
    found = _nobodys(store, settings)
    for name in _rounds(store, settings):
        found += _look(store, settings, policies, name, is_busy(settings.run_dir, name))
    return _sorted(store, found)


def clean(store: ObjectStore, settings: Settings, policies: Mapping[str, RetentionConfig]) -> Survey:
    """Delete what :func:`survey` finds, holding a round's lock no longer than what is its own is looked at and goes."""
    found = _removed(store, _nobodys(store, settings))
    for name in _rounds(store, settings):
        try:
            with lock(settings.run_dir, name):
                found += _removed(store, _look(store, settings, policies, name, busy=False))
        except ConfigError:  # somebody works on it
            found += _look(store, settings, policies, name, busy=True)
    forget_segments(settings.run_dir)
    return _sorted(store, found)


def _removed(store: ObjectStore, found: list[Removal | Kept]) -> list[Removal | Kept]:
    remove(store, [item for item in found if isinstance(item, Removal)])
    return found


def clean_scratch(round_: "Round") -> int:
    """Delete what a finished round leaves in its scratch; a training or answers of other settings stay. Bytes freed."""
    found = [
        item
        for item in (_entry(round_.store, round_.config.name, place, 0) for place in sorted(round_.scratch.iterdir()))
        if isinstance(item, Removal)
    ]
    freed = remove(round_.store, found)
    with suppress(OSError):  # it is not empty
        round_.scratch.rmdir()
    return freed


def free(round_: "Round", item: Removal) -> int | None:
    """Delete something for a running round; the bytes freed, or None when it is left: its own round was begun since."""
    if item.round in ("", round_.config.name):
        return remove(round_.store, [item])
    try:
        with lock(round_.settings.run_dir, item.round):
            return remove(round_.store, [item])
    except ConfigError:
        return None


def shared_memory(run_dir: Path) -> list[Removal]:
    """Segments in /dev/shm that dead engines of ours have left and nobody uses."""
    return [
        Removal(str(item.path), item.size, f"shared memory of a dead {item.purpose}", where="local")
        for item in leftover_segments(run_dir)
    ]


def scratch_entries(store: ObjectStore, scratch: Path, busy: Container[str], own: str = "") -> Iterator[Removal | Kept]:
    """What lies in the rounds' scratch folders, by round.

    Args:
        busy: rounds that other processes work on: all of theirs stays.
        own: the round that asks while it runs: only the checkpoints of its finished drafts may go.
    """
    for name in _folders(scratch):
        for entry in _in_scratch(store, scratch / name, busy=name in busy and name != own):
            if name != own or (isinstance(entry, Removal) and Path(entry.path).name.startswith("train-")):
                yield entry


def _in_scratch(store: ObjectStore, folder: Path, busy: bool) -> Iterator[Removal | Kept]:
    """What lies in one round's scratch folder, which need not be there."""
    if busy:
        if size := folder_bytes(folder):
            yield Kept(str(folder), size, f"{folder.name}: the round is being worked on", where="local")
        return
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        if size := folder_bytes(place):
            yield _entry(store, folder.name, place, size)


def _entry(store: ObjectStore, name: str, place: Path, size: int) -> Removal | Kept:
    """One file or folder of a round's scratch that no living process uses."""
    kind, _, key = place.name.partition("-")
    if place.name == "front-dataset":  # `speculators generate-offline-data` puts a person's states into it
        return Kept(str(place), size, f"{name}: a dataset for speculators' commands", by_hand=True, where="local")
    if (why := NOBODYS.get(kind)) is not None:
        return Removal(str(place), size, f"{name}: {why}", where="local", round=name)
    if kind == "train":
        if _draft_is_whole(store, name, key):
            why = f"{name}: checkpoints of a finished draft, which is in the store"
            return Removal(str(place), size, why, where="local", round=name)
        return Kept(str(place), size, f"{name}: a training that goes on from here", by_hand=True, where="local")
    if kind == "answers":
        if store.exists(f"rounds/{name}/answers/{key.split('.')[0]}/{DONE}"):
            return Removal(str(place), size, f"{name}: answers that are in the store", where="local", round=name)
        return Kept(str(place), size, f"{name}: answers that are not in the store yet", where="local")
    return Kept(str(place), size, f"{name}: not known to this version", by_hand=True, where="local")


def _draft_is_whole(store: ObjectStore, name: str, key: str) -> bool:
    prefix = f"rounds/{name}/draft/{key}"
    try:
        made = json.loads(store.get(f"{prefix}/{TRAINING}"))
        return bool(made["files"]) and whole(store, prefix, made["files"], made.get("sizes", {}))
    except (StoreError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _nobodys(store: ObjectStore, settings: Settings) -> list[Removal | Kept]:
    return [*temporaries(store), *shared_memory(settings.run_dir)]


def _look(
    store: ObjectStore, settings: Settings, policies: Mapping[str, RetentionConfig], name: str, busy: bool
) -> list[Removal | Kept]:
    """What of one round goes and stays, in scratch and store."""
    policy = policies.get(name)
    go = [] if busy or policy is None else removable_by_itself(store, name, policy)
    stay = kept(store, name, policy, {item.path for item in go}, busy)
    return [*_in_scratch(store, settings.scratch_dir / name, busy), *go, *stay]


def _sorted(store: ObjectStore, found: Iterable[Removal | Kept]) -> Survey:
    everything = list(found)
    stay = [item for item in everything if isinstance(item, Kept)]
    return Survey(tuple(item for item in everything if isinstance(item, Removal)), (*stay, *published(store)))


def busy_rounds(store: ObjectStore, settings: Settings) -> set[str]:
    """Rounds of this store or this machine's scratch that a process of this machine works on now."""
    return {name for name in _rounds(store, settings) if is_busy(settings.run_dir, name)}


def _rounds(store: ObjectStore, settings: Settings) -> list[str]:
    return sorted({*store.folders("rounds"), *_folders(settings.scratch_dir)})


def _folders(folder: Path) -> Iterable[str]:
    return sorted(item.name for item in folder.iterdir() if item.is_dir()) if folder.is_dir() else ()
