"""The tensors of a target that stand outside its decoder layers: embedding, final norm, head."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from infra.errors import ConfigError
from infra.targets.target import LONGEST_HEADER, weight_files

PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.")
"""In front of the language model's tensors: of a target that is one, and of several parts' targets."""
EMBEDDING = tuple(f"{prefix}embed_tokens.weight" for prefix in PREFIXES)
NORM = tuple(f"{prefix}norm.weight" for prefix in PREFIXES)
HEAD = ("lm_head.weight", "language_model.lm_head.weight", *EMBEDDING)
"""A target whose head is tied has none of its own: the embedding is it."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class Stored:
    """A tensor in a target's weight files.

    Args:
        name: its name there.
        file: the file.
        dtype: as safetensors names it, e.g. ``BF16``.
        shape: its dimensions.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


def find_stored(folder: Path, names: tuple[str, ...]) -> Stored:
    """The first of the named tensors that the target's files hold; reads headers only.

    Raises:
        ConfigError: they hold none.
    """
    held: dict[str, Stored] = {}
    for path in weight_files(folder):
        held |= {stored.name: stored for stored in _stored(path) if stored.name in names}
    for name in names:
        if name in held:
            return held[name]
    raise ConfigError(f"target {folder.name} has none of the tensors {', '.join(names)}")


def stored_fault(stored: Stored, shape: tuple[int, ...]) -> str | None:
    """Why the trainer and the gates cannot use a tensor as it is; None when they can."""
    if stored.dtype not in FLOATS:
        return f"{stored.name} is stored as {stored.dtype}, and plain numbers are wanted: {', '.join(sorted(FLOATS))}"
    if stored.shape != shape:
        return f"{stored.name} has the shape {list(stored.shape)}, and by config.json it is {list(shape)}"
    return None


def _stored(path: Path) -> list[Stored]:
    with path.open("rb") as stream:
        header = json.loads(stream.read(min(int.from_bytes(stream.read(8), "little"), LONGEST_HEADER)))
    return [
        Stored(name, path, entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__" and prod(entry["shape"])
    ]
