"""Progress of a long step, in the log and as a Prefect progress artifact."""

import time
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from infra.steps.progress import Progress

EVERY_SECONDS = 5.0


class ProgressArtifact:
    """Shows a step's progress; called often, it writes at most every few seconds."""

    def __init__(self, key: str, what: str) -> None:
        self._key, self._what = key, what
        self._artifact: UUID | None = None
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last < EVERY_SECONDS and progress.done < progress.total:
            return
        self._last = now
        get_run_logger().info(progress.text)
        percent = 100.0 * progress.done / max(1, progress.total)
        if self._artifact is None:
            created = create_progress_artifact(
                progress=percent, key=self._key, description=f"{self._what}: {progress.text}"
            )
            self._artifact = created if isinstance(created, UUID) else None
        else:
            update_progress_artifact(
                artifact_id=self._artifact, progress=percent, description=f"{self._what}: {progress.text}"
            )
