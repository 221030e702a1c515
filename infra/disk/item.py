"""Something of the project's that takes room on disk: whether it may go, why, and deleting it."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.store.objects import ObjectStore

Where = Literal["store", "temporary", "local"]


@dataclass(frozen=True)
class Item:
    """Something that takes room.

    Attributes:
        path: what it is: a prefix of the store, or a file or folder.
        bytes: room that it takes.
        why: why it may go, or why it stays, for people.
        may_go: whether it may be deleted.
        by_hand: it stays, and yet can be made again: a person may decide to delete it.
        where: ``store``: all below the prefix ``path``; ``temporary``: the half-written object there; ``local``: a
            file or folder of this machine.
        round: the round it belongs to; empty when it is nobody's.
    """

    path: str
    bytes: int
    why: str
    may_go: bool
    by_hand: bool = False
    where: Where = "store"
    round: str = ""

    def place(self, store: ObjectStore) -> Path | None:
        """Where it lies on this machine; None in a bucket."""
        return Path(self.path) if self.where == "local" else store.local_path(self.path.rsplit("/", 1)[0])


def remove(store: ObjectStore, items: Iterable[Item]) -> int:
    """Delete what may go of ``items``; returns the bytes freed."""
    freed = 0
    for item in items:
        if not item.may_go:
            continue
        if item.where == "store":
            freed += store.delete_tree(item.path)
            continue
        if item.where == "temporary":
            store.sweep_temporaries()  # all that are left: whoever lives is not among them
        elif Path(item.path).is_dir():
            shutil.rmtree(item.path)
        else:
            Path(item.path).unlink(missing_ok=True)
        freed += item.bytes
    return freed
