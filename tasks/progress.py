"""Progress of a long step, in the log and as a Prefect progress artifact."""

import time
from collections.abc import Callable
from typing import cast
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from infra.progress import Progress

EVERY_SECONDS = 5.0


class ProgressArtifact:
    """Shows a step's progress; called often, it writes at most every few seconds.

    Args:
        key: key of the artifact.
        what: what makes progress.
        beside: text to show with it, such as the tail of an engine's log; asked for each time.
    """

    def __init__(self, key: str, what: str, beside: Callable[[], str] | None = None) -> None:
        self._key, self._what, self._beside = key, what, beside
        self._artifact: UUID | None = None
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last < EVERY_SECONDS and progress.done < progress.total:
            return
        self._last = now
        log = get_run_logger()
        log.info(progress.text)
        text = f"{self._what}: {progress.text}"
        if self._beside is not None:
            text += f"\n\n```\n{self._beside()}\n```"
        try:
            self._show(100.0 * progress.done / max(1, progress.total), text)
        except httpx.HTTPError as error:
            # A picture of the work must not end the work.
            log.warning(f"progress could not be shown: {error}")

    def _show(self, percent: float, text: str) -> None:
        if self._artifact is None:
            created = create_progress_artifact(progress=percent, key=self._key, description=text)
            # Called outside of an event loop it is an id, not a coroutine.
            self._artifact = cast(UUID, created)
        else:
            update_progress_artifact(artifact_id=self._artifact, progress=percent, description=text)
