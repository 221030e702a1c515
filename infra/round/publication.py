"""The published draft: its name and place, and what makes it count."""

from pydantic import BaseModel, ConfigDict

from infra.round.context import Round
from infra.store.objects import ObjectStore
from infra.store.rounds import RoundStore, read_stored, whole

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


def publishing_rounds(round_: Round) -> list[RoundStore]:
    """The other rounds that published a draft for this round's target, by name."""
    root = f"published/{round_.config.target.name}"
    found = [_publication(round_.store, f"{root}/{folder}") for folder in round_.store.folders(root)]
    names = {item.round for item in found if item is not None} - {round_.config.name}
    return [RoundStore(round_.store, name) for name in sorted(names)]


def _publication(store: ObjectStore, prefix: str) -> Publication | None:
    return read_stored(store, f"{prefix}/{PUBLICATION}", Publication)
