"""The publish step: a folder for each engine, which it loads anywhere, with the draft's figures and provenance."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.errors import StoreError
from infra.results import Report
from infra.round.context import Round
from infra.round.layouts import draft_folder, sglang_draft
from infra.store.objects import ObjectStore
from infra.store.rounds import RoundStore
from infra.store.stored import read_stored, whole

PUBLICATION = "publication.json"


class Publication(BaseModel):
    """What makes a published draft count: the hash and size of each of its files. Written last."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    round: str
    draft_key: str
    files: dict[str, str]
    sizes: dict[str, int] = {}


def draft_name(round_: Round) -> str:
    """Name of the published draft."""
    return f"{round_.config.target.name}-eagle3-{round_.config.name}-{round_.keys.draft[:8]}"


def published_prefix(round_: Round) -> str:
    """Where the draft is published, below the store's root."""
    return f"published/{round_.config.target.name}/{draft_name(round_)}"


def publication_done(round_: Round) -> bool:
    """Whether the draft of this key is published and its files are whole, by their sizes."""
    prefix = published_prefix(round_)
    found = _publication(round_.store, prefix)
    if found is None or found.key != round_.keys.published:
        return False
    return whole(round_.store, prefix, found.files, found.sizes)


def publish(round_: Round, report: Report, cards: Mapping[str, str]) -> str:
    """Copy the draft to its published place in every layout that can hold it; returns the serving engine's URL.

    Args:
        cards: the model card (README.md) of each published layout, by engine.

    Raises:
        StoreError: a file of the draft is not what training recorded.
    """
    prefix, draft = published_prefix(round_), draft_folder(round_)
    files: dict[str, bytes | Path] = {}
    for layout in report.layouts:
        if not layout.published:
            round_.store.delete_tree(f"{prefix}/{layout.engine}")  # of an earlier version of the engine
            continue
        if layout.engine == "sglang":
            parts = sorted(sglang_draft(round_, draft).iterdir())
        else:
            parts = [_checked(draft / name, digest) for name, digest in report.training.files.items()]
        files |= {f"{layout.engine}/{path.name}": path for path in parts}
        files[f"{layout.engine}/README.md"] = cards[layout.engine].encode()
    for name, data in files.items():
        round_.store.put(f"{prefix}/{name}", data)
    publication = Publication(
        key=round_.keys.published,
        round=round_.config.name,
        draft_key=round_.keys.draft,
        files={name: _sha256(data) for name, data in files.items()},
        sizes={name: len(data) if isinstance(data, bytes) else data.stat().st_size for name, data in files.items()},
    )
    round_.store.put(f"{prefix}/{PUBLICATION}", publication.model_dump_json(indent=1).encode())
    return report.published


def publishing_rounds(round_: Round) -> list[RoundStore]:
    """The other rounds that published a draft for this round's target, by name."""
    root = f"published/{round_.config.target.name}"
    found = [_publication(round_.store, f"{root}/{folder}") for folder in round_.store.folders(root)]
    names = {item.round for item in found if item is not None} - {round_.config.name}
    return [RoundStore(round_.store, name) for name in sorted(names)]


def _publication(store: ObjectStore, prefix: str) -> Publication | None:
    return read_stored(store, f"{prefix}/{PUBLICATION}", Publication)


def _checked(path: Path, digest: str) -> Path:
    if _sha256(path) != digest:
        raise StoreError(
            f"{path} is damaged", expected=f"sha256 {digest}", fix=f"delete {path.parent} and start the round again"
        )
    return path


def _sha256(data: bytes | Path) -> str:
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    with data.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
