"""What of this machine's scratch and shared memory may be deleted, and the clean-up of a whole machine."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from infra.config.round import RetentionConfig
from infra.config.settings import Settings
from infra.errors import ConfigError, StoreError
from infra.machine.host import folder_bytes
from infra.machine.segments import forget_segments, leftover_segments
from infra.steps.lock import is_busy, lock
from infra.steps.results import TRAINING
from infra.steps.retention import Kept, Removal, kept, removable_everywhere, remove, temporaries
from infra.store.answers import DONE
from infra.store.objects import ObjectStore


@dataclass(frozen=True)
class Survey:
    """What a clean-up deletes, in its order, and what it leaves."""

    go: tuple[Removal, ...]
    stay: tuple[Kept, ...]


def survey(store: ObjectStore, settings: Settings, policies: Mapping[str, RetentionConfig]) -> Survey:
    """Look at the store, scratch and shared memory of this machine; changes nothing.

    Args:
        policies: retention by round, for the rounds whose policy is known.
    """
    return _survey(store, settings, policies, busy_rounds(store, settings))


def clean(store: ObjectStore, settings: Settings, policies: Mapping[str, RetentionConfig]) -> Survey:
    """Delete what :func:`survey` finds, holding the lock of every round that nobody works on."""
    busy: set[str] = set()
    with ExitStack() as locks:
        for name in _rounds(store, settings):
            try:
                locks.enter_context(lock(settings.run_dir, name))
            except ConfigError:
                busy.add(name)
        found = _survey(store, settings, policies, busy)
        remove(store, found.go)
    forget_segments(settings.run_dir)
    return found


def shared_memory(run_dir: Path) -> list[Removal]:
    """Segments in /dev/shm that dead engines of ours have left and nobody uses."""
    return [
        Removal(str(item.path), item.size, f"shared memory of a dead {item.purpose}", where="local")
        for item in leftover_segments(run_dir)
    ]


def scratch_entries(
    store: ObjectStore, scratch: Path, busy: Collection[str], own: str = ""
) -> Iterator[Removal | Kept]:
    """What lies in the rounds' scratch folders, by round.

    Args:
        busy: rounds that other processes work on: all of theirs stays.
        own: the round that asks while it runs: only the checkpoints of its finished drafts may go.
    """
    for name in _folders(scratch):
        folder = scratch / name
        if name in busy and name != own:
            yield Kept(str(folder), folder_bytes(folder), f"{name}: the round is being worked on", where="local")
            continue
        for place in sorted(folder.iterdir()):
            if size := folder_bytes(place):
                entry = _entry(store, name, place, size)
                if name != own or (isinstance(entry, Removal) and place.name.startswith("train-")):
                    yield entry


def _entry(store: ObjectStore, name: str, place: Path, size: int) -> Removal | Kept:
    """One file or folder of a round's scratch that no living process uses."""
    kind, _, key = place.name.partition("-")
    if place.name == "staging":
        return Removal(str(place), size, f"{name}: staging of a dead engine", where="local", round=name)
    if kind == "draft":
        return Removal(
            str(place), size, f"{name}: a copy of a draft, made again when needed", where="local", round=name
        )
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
        files = json.loads(store.get(f"{prefix}/{TRAINING}"))["files"]
    except (StoreError, ValueError, KeyError):
        return False
    return bool(files) and all(store.exists(f"{prefix}/{file}") for file in files)


def _survey(
    store: ObjectStore, settings: Settings, policies: Mapping[str, RetentionConfig], busy: Collection[str]
) -> Survey:
    scratch = list(scratch_entries(store, settings.scratch_dir, busy))
    go = [
        *temporaries(store),
        *shared_memory(settings.run_dir),
        *(item for item in scratch if isinstance(item, Removal)),
        *removable_everywhere(store, policies, busy),
    ]
    stay = [item for item in scratch if isinstance(item, Kept)]
    return Survey(tuple(go), (*stay, *kept(store, policies, {item.path for item in go}, busy)))


def busy_rounds(store: ObjectStore, settings: Settings) -> set[str]:
    """Rounds of this store or this machine's scratch that a process of this machine works on now."""
    return {name for name in _rounds(store, settings) if is_busy(settings.run_dir, name)}


def _rounds(store: ObjectStore, settings: Settings) -> list[str]:
    return sorted({*store.folders("rounds"), *_folders(settings.scratch_dir)})


def _folders(folder: Path) -> Iterable[str]:
    return sorted(item.name for item in folder.iterdir() if item.is_dir()) if folder.is_dir() else ()
