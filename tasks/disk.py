"""The disk guard's notices: in the log, as Prefect events that an automation can act on, and in the report."""

from prefect import get_run_logger
from prefect.events import emit_event

from infra.disk.guard import Notice
from infra.progress import Progress
from infra.round.context import Round
from infra.round.ledger import Ledger
from tasks.progress import ProgressArtifact

REPORTED = ("resume", "freed", "stop")
"""A pause is told in the report by the line that ends it."""


def watch_disk(round_: Round, ledger: Ledger) -> None:
    """From here on tell what the round's disk guard does: events ``eagle3.disk.<kind>``, e.g. ``eagle3.disk.pause``.

    The event's resource is the round (``eagle3.round.<name>``); the flow run and its task are related to it.
    """
    waiting = ProgressArtifact("disk", "room on disk")

    def tell(notice: Notice) -> None:
        if notice.kind == "waiting":
            waiting(Progress(0, 1, 0.0, None, notice.text))
            return
        get_run_logger().warning(notice.text)
        name = round_.config.name
        emit_event(
            f"eagle3.disk.{notice.kind}",
            resource={"prefect.resource.id": f"eagle3.round.{name}", "prefect.resource.name": name},
            payload={"text": notice.text},
        )
        if notice.kind in REPORTED:
            ledger.notes.append(notice.text)

    round_.disk.tell = tell
