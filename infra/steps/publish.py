"""The publish step: a folder for each engine, which it loads anywhere, with the draft's figures and provenance."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from infra.errors import StoreError
from infra.results import Report
from infra.round.context import RoundContext
from infra.round.draft_layouts import draft_folder, draft_for
from infra.round.publication import published_prefix
from infra.store.publications import PUBLICATION, Publication


def publish(context: RoundContext, report: Report, cards: Mapping[str, str]) -> str:
    """Copy the draft to its published place in every layout that can hold it; returns the serving engine's URL.

    Args:
        cards: the model card (README.md) of each published layout, by engine.

    Raises:
        StoreError: a file of the draft is not what training recorded.
    """
    prefix, draft = published_prefix(context), draft_folder(context)
    files: dict[str, bytes | Path] = {}
    for layout in report.layouts:
        if not layout.published:
            context.store.delete_tree(f"{prefix}/{layout.engine}")  # of an earlier version of the engine
            continue
        made = draft_for(context, layout.engine, draft)
        if made == draft:
            parts = [_checked(draft / name, digest) for name, digest in report.training.files.items()]
        else:
            parts = sorted(made.iterdir())
        files |= {f"{layout.engine}/{path.name}": path for path in parts}
        files[f"{layout.engine}/README.md"] = cards[layout.engine].encode()
    for name, data in files.items():
        context.store.put(f"{prefix}/{name}", data)
    publication = Publication(
        key=context.keys.published,
        round=context.config.name,
        draft_key=context.keys.draft,
        files={name: _sha256(data) for name, data in files.items()},
        sizes={name: len(data) if isinstance(data, bytes) else data.stat().st_size for name, data in files.items()},
    )
    context.store.put(f"{prefix}/{PUBLICATION}", publication.model_dump_json(indent=1).encode())
    return report.published


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
