"""A flow that goes on after the server has given its run up: it notices, ends what it started, and says so.

The server marks a run Crashed that sends no heartbeat: a laptop slept, a process was stopped for a while. A person may
end a run's record by hand, too. Another run may have begun since, so this one must not work on.
"""

import contextvars
import os
import signal
import threading
import time
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger, LoggerAdapter
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException

LOOK_SECONDS = 15.0
"""Pause between two looks at the run's state on the server."""
SLEPT_SECONDS = 30.0
"""A pause longer by this is the machine's sleep, or a stop of this process."""

Log = Logger | LoggerAdapter[Logger]


@contextmanager
def ends_with_its_run() -> Iterator[None]:
    """Around a flow's work: it is ended, as by TERM, when its run has come to a final state on the server.

    Outside of a flow run, and in a thread that receives no signals, nothing is looked at.
    """
    context, log = FlowRunContext.get(), get_run_logger()
    run = context.flow_run if context is not None else None
    if run is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    presence = _Presence(run.id, log)
    # The settings of this context say which server it is.
    threading.Thread(target=contextvars.copy_context().run, args=(presence.look,), daemon=True).start()
    try:
        yield
    except CancelledError:
        # Prefect throws it into a flow that cannot tell the server that it still holds its deployment's slot.
        log.error("ended: this run could not keep its slot on the Prefect server. Start the round again, it resumes")
        raise
    finally:
        presence.over()
        if presence.found is not None:
            run.state = presence.found  # so that Prefect's own ending does not write another one over it


class _Presence:
    """Looks at a run's state now and then; ``found`` is the final one that it has without this flow's having ended."""

    def __init__(self, run: UUID, log: Log) -> None:
        self._run, self._log = run, log
        self._over, self._ending = threading.Event(), threading.Lock()
        self.found: State | None = None

    def over(self) -> None:
        """The flow has ended by itself, or is ending."""
        with self._ending:
            self._over.set()

    def look(self) -> None:
        """Until the flow is over, or the server says that it is (a thread of its own)."""
        before = _now()
        while not self._over.wait(LOOK_SECONDS):
            pause, before = _now() - before, _now()
            if pause > LOOK_SECONDS + SLEPT_SECONDS:
                self._log.warning(
                    f"this run stood still for {pause:.0f} s: the machine slept, or its process was stopped"
                )
            state = self._state()
            if state is not None and state.is_final():
                self._end(state)
                return

    def _state(self) -> State | None:
        """The run's state on the server; None when it is not to be learnt now."""
        try:
            return get_client(sync_client=True).read_flow_run(self._run).state
        except (httpx.HTTPError, PrefectException):
            return None

    def _end(self, state: State) -> None:
        with self._ending:
            if self._over.is_set():
                return
            self.found = state
            self._log.error(
                f"this run is {state.name} on the server ({state.message or 'without a reason'}): it stops here, and "
                "its engines and trainer are ended. Start the round again, it resumes"
            )
            os.kill(os.getpid(), signal.SIGTERM)


def _now() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
