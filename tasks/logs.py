"""What ``infra`` logs, in the log of the run; its events become Prefect events that an automation can act on."""

import logging

from prefect import get_run_logger
from prefect.events import emit_event
from prefect.exceptions import MissingContextError
from prefect.logging.handlers import APILogHandler

from infra.events import Event


class RunLog(APILogHandler):
    """Sends log records to the flow or task run in which they are logged.

    Prefect's own handler (``PREFECT_LOGGING_EXTRA_LOGGERS``) drops what is logged in a thread of a pool, which knows
    no run. Here it goes to the run that logged last. What is logged before any run is not sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._run: dict[str, object] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Send the record, and the event that it carries."""
        try:
            run = get_run_logger()
        except MissingContextError:
            pass
        else:
            self._run = dict(run.extra or {}) if isinstance(run, logging.LoggerAdapter) else {}
        if not self._run:
            return
        vars(record).update(self._run)
        super().emit(record)
        event = getattr(record, "event", None)
        if isinstance(event, Event):
            _emit(event)


def _emit(event: Event) -> None:
    """Emit ``eagle3.<name>``; flow run and task are related to it where the thread knows them."""
    emit_event(
        f"eagle3.{event.name}",
        resource={
            "prefect.resource.id": f"eagle3.{event.resource}",
            "prefect.resource.name": event.resource.partition(".")[2],
        },
        payload={"text": event.text},
    )


def show_logs_of_infra() -> None:
    """From here on, in this process, runs show what ``infra`` logs."""
    log = logging.getLogger("infra")
    log.setLevel(logging.INFO)
    log.addHandler(RunLog())
