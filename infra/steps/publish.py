"""The publish step: a folder that an engine loads anywhere, with its figures and provenance."""

import hashlib

from pydantic import BaseModel, ConfigDict

from infra.errors import StoreError
from infra.report.card import card
from infra.steps.context import Round
from infra.steps.results import Report

PUBLICATION = "publication.json"


class Publication(BaseModel):
    """What makes a published draft count: the hash of each of its files. Written last."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    round: str
    draft_key: str
    files: dict[str, str]


def draft_name(round_: Round) -> str:
    """Name of the published draft."""
    return f"{round_.config.target.name}-eagle3-{round_.config.name}-{round_.keys.draft[:8]}"


def published_prefix(round_: Round) -> str:
    """Where the draft is published, below the store's root."""
    return f"published/{round_.config.target.name}/{draft_name(round_)}"


def publication_done(round_: Round) -> bool:
    """Whether the draft of this key is published and its files are there."""
    prefix = published_prefix(round_)
    path = f"{prefix}/{PUBLICATION}"
    if not round_.store.exists(path):
        return False
    try:
        found = Publication.model_validate_json(round_.store.get(path))
    except ValueError:
        return False
    return found.key == round_.keys.published and all(round_.store.exists(f"{prefix}/{name}") for name in found.files)


def publish(round_: Round, report: Report) -> str:
    """Copy the draft to its published place in vLLM's layout; returns its URL.

    Raises:
        StoreError: a file of the draft is not what training recorded.
    """
    source, prefix = round_.prefix("draft"), published_prefix(round_)
    files: dict[str, bytes] = {}
    for name, digest in report.training.files.items():
        data = round_.store.get(f"{source}/{name}")
        if hashlib.sha256(data).hexdigest() != digest:
            raise StoreError(
                f"{source}/{name} is damaged",
                expected=f"sha256 {digest}",
                fix="delete this folder and start the round again",
            )
        files[f"vllm/{name}"] = data
    files["vllm/README.md"] = card(report, round_.config.target.source).encode()
    for name, data in files.items():
        round_.store.put(f"{prefix}/{name}", data)
    publication = Publication(
        key=round_.keys.published,
        round=round_.config.name,
        draft_key=round_.keys.draft,
        files={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    )
    round_.store.put(f"{prefix}/{PUBLICATION}", publication.model_dump_json(indent=1).encode())
    return report.published
