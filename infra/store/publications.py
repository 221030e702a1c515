"""Published drafts in the store: what makes one count, and which is a round's."""

from pydantic import BaseModel, ConfigDict

from infra.store.objects import ObjectStore
from infra.store.rounds import RoundStore, read_stored

PUBLICATION = "publication.json"


class Publication(BaseModel):
    """What makes a published draft count: the hash and size of each of its files. Written last."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    round: str
    draft_key: str
    files: dict[str, str]
    sizes: dict[str, int] = {}


def read_publication(store: ObjectStore, prefix: str) -> Publication | None:
    """The publication below a prefix; None when there is none, or not a whole one."""
    return read_stored(store, f"{prefix}/{PUBLICATION}", Publication)


def live_publication(store: ObjectStore, round_name: str) -> str | None:
    """Prefix of the draft that a round published last; None when it has published none.

    Raises:
        StoreError: the round's pointer is damaged.
    """
    live = RoundStore(store, round_name).current("published")
    for target in store.folders("published") if live is not None else ():
        for draft in store.folders(f"published/{target}"):
            found = read_publication(store, prefix := f"published/{target}/{draft}")
            if found is not None and live is not None and (found.round, found.key) == (round_name, live.key):
                return prefix
    return None
