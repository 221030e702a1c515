"""Stored results, read back only if they are whole."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from pydantic import BaseModel

from infra.store.objects import ObjectMissing, ObjectStore

Kind = TypeVar("Kind", bound=BaseModel)


def read_stored(store: ObjectStore, path: str, kind: type[Kind]) -> Kind | None:
    """A stored result, or None when it is not there or not whole: it is made again then."""
    try:
        return kind.model_validate_json(store.get(path))
    except (ObjectMissing, ValueError):
        return None


def whole(store: ObjectStore, prefix: str, files: Iterable[str], sizes: Mapping[str, int]) -> bool:
    """Whether the files below a prefix are there, and as long as they were written, where that is known."""
    try:
        return all(sizes.get(name) in (None, store.size(f"{prefix}/{name}")) for name in files)
    except ObjectMissing:
        return False
