"""What the disk guard waits for, as an artifact, and what it did, in the report."""

from infra.round.context import RoundContext
from infra.round.ledger import Ledger
from tasks.progress import ProgressArtifact


def watch_disk(context: RoundContext, ledger: Ledger) -> None:
    """From here on the round's disk guard shows its waiting and writes into the report's notes."""
    context.disk.progress = ProgressArtifact("disk", "room on disk")
    context.disk.notes = ledger.notes
