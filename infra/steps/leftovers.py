"""What of this machine's scratch and shared memory may be deleted, and the clean-up of a whole machine."""

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.config.round import RetentionConfig
from infra.config.settings import Settings
from infra.errors import ConfigError, StoreError
from infra.machine.host import folder_bytes
from infra.machine.segments import forget_segments, leftover_segments
from infra.steps.lock import is_busy, lock
from infra.steps.results import TRAINING, whole
from infra.steps.retention import Kept, Removal, kept, removable_everywhere, remove, temporaries
from infra.store.answers import DONE
from infra.store.objects import ObjectStore

if TYPE_CHECKING:
    from infra.steps.context import Round


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
    held: set[str] = set()
    with ExitStack() as locks:
        for name in _rounds(store, settings):
            with suppress(ConfigError):
                locks.enter_context(lock(settings.run_dir, name))
                held.add(name)
        found = _survey(store, settings, policies, _AllBut(held))
        remove(store, found.go)
    forget_segments(settings.run_dir)
    return found


class _AllBut(Container[str]):
    """Every round but these: one that is begun only now is among them."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name not in self._names


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
        made = json.loads(store.get(f"{prefix}/{TRAINING}"))
        return bool(made["files"]) and whole(store, prefix, made["files"], made.get("sizes", {}))
    except (StoreError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _survey(
    store: ObjectStore, settings: Settings, policies: Mapping[str, RetentionConfig], busy: Container[str]
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
