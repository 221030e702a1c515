"""What a round still has to write, by file system: folders that share one share its room."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from infra.errors import GateError
from infra.machine.disk import file_system
from infra.machine.host import folder_bytes
from infra.progress import gib
from infra.round.context import Round


class Room(BaseModel):
    """One file system that the round writes to."""

    model_config = ConfigDict(frozen=True)

    mount: str = Field(description="Where it is mounted; /dev/shm for shared memory.")
    folders: tuple[str, ...] = Field(description="What lies on it: store, scratch or both.")
    needed: int = Field(description="Bytes that the round still has to write there.")
    free: int = Field(description="Bytes that may still be written there.")


def left(round_: Round, step: str, key: str | None, size: int, scratch: int) -> tuple[int, int]:
    """(store, scratch) bytes of a step that are still to be written, what an earlier attempt wrote taken off.

    Args:
        key: the step's key; None while it is not known.
        size: bytes that the step holds in the end, in store and scratch.
        scratch: those of them that lie in scratch.
    """
    if key is None:
        return size - scratch, scratch
    stored = sum(item.size for item in round_.store.list(round_.rounds.step_prefix(step, key)))
    staged = folder_bytes(round_.settings.scratch_dir / round_.config.name / f"train-{key}") if scratch else 0
    return max(0, size - scratch - stored), max(0, scratch - staged)


def rooms(round_: Round, store: int, scratch: int) -> tuple[Room, ...]:
    """The file systems of store (unless it is a bucket) and scratch, and what is to be written to each, bytes."""
    root = round_.store.local_path("rounds")
    folders: list[tuple[str, Path, int]] = [("scratch", round_.settings.scratch_dir, scratch)]
    if root is not None:
        folders.insert(0, ("store", root, store))
    systems = {name: file_system(path) for name, path, _ in folders}
    found = []
    for device, system in {item.device: item for item in systems.values()}.items():
        here = [(name, size) for name, _, size in folders if systems[name].device == device]
        found.append(
            Room(
                mount=str(system.mount),
                folders=tuple(name for name, _ in here),
                needed=sum(size for _, size in here),
                free=system.free,
            )
        )
    return tuple(found)


def room_gate(name: str, found: Iterable[Room], low_water: int) -> None:
    """Stop a round that would not leave the low-water mark free where it writes.

    Raises:
        GateError: naming the file system and what shares it.
    """
    for room in found:
        if room.needed and room.needed + low_water > room.free:
            raise GateError(
                "plan",
                f"round {name} still needs {gib(room.needed)} of disk on {room.mount} "
                f"(for {' and '.join(room.folders)}) and {gib(room.free)} are free",
                expected=f"{gib(low_water)} left free beside it (budget.free_bytes)",
                fix="free space (eagle3 clean --dry-run), lower prompts.count, or put store or scratch elsewhere "
                "(EAGLE3_STORE_URL, EAGLE3_SCRATCH_PATH)",
            )
