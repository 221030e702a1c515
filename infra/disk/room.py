"""Room: what is still to be written to each file system, and what keeps it from fitting. Folders that share a file
system share its room."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from infra.errors import GateError
from infra.machine.disk import FileSystem, file_system
from infra.store.objects import ObjectStore
from infra.units import size

Place = Literal["store", "scratch"]


class Room(BaseModel):
    """One file system that the round writes to."""

    model_config = ConfigDict(frozen=True)

    mount: str = Field(description="Where it is mounted; /dev/shm for shared memory.")
    folders: tuple[str, ...] = Field(description="What lies on it: store, scratch or both.")
    needed: int = Field(description="Bytes that the round still has to write there.")
    free: int = Field(description="Bytes that may still be written there.")


@dataclass(frozen=True)
class Shortage:
    """Why there is not enough room.

    Attributes:
        device: the file system that is short; None when the round's own budget is.
        text: how much there is and how much is needed, for people.
        needs: what should be free, or what the round may hold, for people.
    """

    device: int | None
    text: str
    needs: str


def places(store: ObjectStore, scratch: Path) -> dict[Place, FileSystem]:
    """The file systems of store (unless it is a bucket) and scratch, as they are now."""
    root = store.local_path("rounds")
    return {**({"store": file_system(root)} if root is not None else {}), "scratch": file_system(scratch)}


def rooms(systems: Mapping[Place, FileSystem], needs: Mapping[Place, int]) -> tuple[Room, ...]:
    """Each file system once, with the bytes that are to be written to it."""
    return tuple(
        Room(
            mount=str(system.mount),
            folders=tuple(names),
            needed=sum(needs.get(name, 0) for name in names),
            free=system.free,
        )
        for system, names in _shared(systems)
    )


def shortage(systems: Mapping[Place, FileSystem], needs: Mapping[Place, int], low_water: int) -> Shortage | None:
    """What keeps ``needs`` from fitting with ``low_water`` bytes left free beside them, if anything does."""
    for system, names in _shared(systems):
        needed = sum(needs.get(name, 0) for name in names) + low_water
        if system.free < needed:
            text = f"{size(system.free)} free on {system.mount} ({' and '.join(names)}), needs {size(needed)}"
            return Shortage(system.device, text, f"{size(needed)} free on {system.mount}")
    return None


def over_budget(held: int, more: int, bound: int | None) -> Shortage | None:
    """What keeps a round that holds ``held`` bytes from writing ``more``, if its budget does."""
    if bound is None or held + more <= bound:
        return None
    text = f"the round holds {size(held)} and needs {size(more)} more, its budget is {size(bound)}"
    return Shortage(None, text, f"no more than {size(bound)} held by the round (budget.disk_bytes)")


def room_gate(name: str, found: Iterable[Room], low_water: int) -> None:
    """Stop a round that would not leave the low-water mark free where it writes.

    Raises:
        GateError: naming the file system and what shares it.
    """
    for room in found:
        if room.needed and room.needed + low_water > room.free:
            raise GateError(
                "plan",
                f"round {name} still needs {size(room.needed)} of disk on {room.mount} "
                f"(for {' and '.join(room.folders)}) and {size(room.free)} are free",
                expected=f"{size(low_water)} left free beside it (budget.free_bytes)",
                fix="free space (eagle3 clean --dry-run), lower prompts.count, or put store or scratch elsewhere "
                "(EAGLE3_STORE_URL, EAGLE3_SCRATCH_PATH)",
            )


def _shared(systems: Mapping[Place, FileSystem]) -> list[tuple[FileSystem, list[Place]]]:
    """Each file system with the places that lie on it."""
    by_device = {system.device: system for system in systems.values()}
    return [
        (system, [name for name, other in systems.items() if other.device == device])
        for device, system in by_device.items()
    ]
