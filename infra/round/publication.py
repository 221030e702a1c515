"""The published draft: its name and place, and what makes it count."""

from infra.round.context import RoundContext
from infra.store.publications import read_publication
from infra.store.rounds import RoundStore, whole


def draft_name(context: RoundContext) -> str:
    """Name of the published draft."""
    return f"{context.config.target.name}-eagle3-{context.config.name}-{context.keys.draft[:8]}"


def published_prefix(context: RoundContext) -> str:
    """Where the draft is published, below the store's root."""
    return f"published/{context.config.target.name}/{draft_name(context)}"


def publication_done(context: RoundContext) -> bool:
    """Whether the draft of this key is published and its files are whole, by their sizes."""
    prefix = published_prefix(context)
    found = read_publication(context.store, prefix)
    if found is None or found.key != context.keys.published:
        return False
    return whole(context.store, prefix, found.files, found.sizes)


def publishing_rounds(context: RoundContext) -> list[RoundStore]:
    """The other rounds that published a draft for this round's target, by name."""
    root = f"published/{context.config.target.name}"
    found = [read_publication(context.store, f"{root}/{folder}") for folder in context.store.folders(root)]
    names = {item.round for item in found if item is not None} - {context.config.name}
    return [RoundStore(context.store, name) for name in sorted(names)]
