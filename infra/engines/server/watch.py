"""Looking after a server while it serves: one that hangs is ended, so that those who wait for it hear of it."""

import threading
import time

from infra.engines.client.counters import parse_token_total
from infra.engines.client.flights import Flights
from infra.engines.server.server import Server

LOOKS_A_SILENCE = 10
LONGEST_PAUSE = 5.0
HEALTH_SECONDS = 30.0
"""SGLang's /health runs a token through the scheduler, and waits up to 20 s for it (0.5.23, http_server.py)."""


class Watch:
    """A thread that ends a server which has requests in flight and does nothing; ``server.hang`` says so then.

    Nothing means: for ``silence_seconds`` no request landed, and the token counters stood still or could not be asked
    for (an engine without counters is judged by ``/health``). Log lines do not count: API servers go on writing when
    the engine behind them is stuck.

    Args:
        server: a ready server.
        flights: the requests that it is sent.
        silence_seconds: longest silence.
    """

    def __init__(self, server: Server, flights: Flights, silence_seconds: float) -> None:
        self._server, self._flights, self._silence = server, flights, silence_seconds
        self._health_seconds = min(HEALTH_SECONDS, max(5.0, silence_seconds))
        self._over, self._ending = threading.Event(), threading.Lock()
        self._landed, self._tokens = 0, -1.0
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"watch of {server.purpose}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; returns when a server that was found hung is gone."""
        self._over.set()
        with self._ending:  # not for a look in progress: on a busy machine that takes its time
            return

    def _run(self) -> None:
        pause = min(LONGEST_PAUSE, self._silence / LOOKS_A_SILENCE)
        while not self._over.wait(pause) and not self._server.ended:
            why = self._look()
            with self._ending:
                if why is not None and not self._over.is_set() and not self._server.ended:
                    self._server.end_hung(why)
                    return

    def _look(self) -> str | None:
        """Why the server counts as hung; None while it does not."""
        waiting, landed = self._flights.in_flight, self._flights.landed
        metrics = self._server.page("/metrics") if waiting else None
        tokens = parse_token_total(metrics) if metrics is not None else None
        now = time.monotonic()
        if not waiting or landed != self._landed or (tokens is not None and tokens != self._tokens):
            self._landed, self._moved = landed, now
            self._tokens = self._tokens if tokens is None else tokens
            return None
        still = now - self._moved
        if still < self._silence:
            return None
        if tokens is None and self._server.page("/health", self._health_seconds) is not None:
            return None
        how = "it answers neither /metrics nor /health" if tokens is None else "its token counters stand still"
        return f"hung: {waiting} requests in flight, none answered in {still:.0f} s, and {how}"
