"""Prefect's server, which wakes less often while nothing happens: ``python -m deployments.server server start ...``.

Idle, its background worker looks 18 times a second whether there is work, and has no setting for that. A task that is
put into its queue wakes it at once all the same; what is due by time begins up to ``DUE_SECONDS`` later. Written
against prefect 3.9.1, ``server/api/background_workers.py``, and pydocket 0.27.0, ``worker.py``; with another pydocket
the server is as Prefect makes it.
"""

from datetime import timedelta
from importlib.metadata import version

from prefect.cli import app
from prefect.server.api import background_workers

TRIED = "0.27.0"
WAIT_SECONDS = 2.0
"""Longest wait for a task, which ends when one comes; a server that is stopped may have to wait it out."""
DUE_SECONDS = 1.0
"""Pause between two looks for what is due."""


class CalmWorker(background_workers.Worker):
    """A worker that looks less often, and does not listen for cancellations of tasks: Prefect's server has none."""

    def __init__(self, queue: background_workers.Docket) -> None:
        super().__init__(
            queue,
            minimum_check_interval=timedelta(seconds=WAIT_SECONDS),
            scheduling_resolution=timedelta(seconds=DUE_SECONDS),
        )

    async def _cancellation_listener(self) -> None:
        session = self._processing_session
        if session is not None:
            session.cancellation_ready.set()
            await session.stopping.wait()


if __name__ == "__main__":
    if version("pydocket") == TRIED:
        background_workers.Worker = CalmWorker  # type: ignore[assignment,misc]
    app()
