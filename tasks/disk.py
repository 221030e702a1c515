"""What the disk guard waits for, as an artifact, and what it did, in the report."""

from infra.round.context import Round
from infra.round.ledger import Ledger
from tasks.progress import ProgressArtifact


def watch_disk(round_: Round, ledger: Ledger) -> None:
    """From here on the round's disk guard shows its waiting and writes into the report's notes."""
    round_.disk.progress = ProgressArtifact("disk", "room on disk")
    round_.disk.notes = ledger.notes
