"""One engine server for one purpose, started when first needed and again after it died."""

import logging
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from infra.config.round import EngineConfig, EngineName
from infra.engines.client.client import Client, EngineSilent
from infra.engines.client.extraction import Extractor
from infra.engines.client.flights import Flights
from infra.engines.registry import LaunchRequest, Profile, Server, find_engine, start
from infra.engines.server.watch import Watch
from infra.errors import EngineError
from infra.events import Event
from infra.machine.logtail import last_lines
from infra.round.context import RoundContext

log = logging.getLogger(__name__)

LOG_LINES = 6
DEATH_SHOWS_SECONDS = 3.0
"""A server whose engine has just died may call itself healthy for a moment."""
POLL_SECONDS = 0.2


class Serving:
    """A server of the round's engine; ``begin`` returns at once, ``ready`` waits.

    Used as a context manager: at its end the server and everything it started are gone.

    Attributes:
        flights: the requests of the live server; whoever sends one says so there, and the server is watched by it.
        events: what happened to its servers; the events of a start, ``server.hang``, ``server.restart`` and
            ``server.quarantine``.
    """

    def __init__(
        self, context: RoundContext, profile: Profile, draft: Path | None = None, engine: EngineName | None = None
    ) -> None:
        """A server that is not started yet; ``engine`` takes the place of the round's choice for the profile."""
        self.context = context
        self.profile = profile
        self.engine = engine or (context.config.extract.engine if profile == "extract" else context.config.serve_with)
        self.staging = context.scratch / (f"staging-{engine}" if engine else "staging")
        config = context.config.engines[self.engine]
        self._request = LaunchRequest(
            target=context.target,
            config=config,
            profile=profile,
            taps=context.config.extract.taps if profile == "extract" else (),
            draft=draft,
            drafts=context.config.evaluate.drafts,
            staging=self.staging if profile == "extract" else None,
            concurrency=_concurrency(context, profile),
            devices=context.devices if config.device == "cuda" else (),
        )
        self.seconds_to_ready: list[float] = []
        self.flights = Flights()
        self.events: list[Event] = []
        self._server: Server | None = None
        self._client: Client | None = None
        self._watch: Watch | None = None

    @property
    def config(self) -> EngineConfig:
        """How the engine runs."""
        return self._request.config

    def tell(self, what: Literal["hang", "restart", "quarantine"], text: str) -> None:
        """Log and keep an event of this server's."""
        self.events.append(Event(f"server.{what}", f"server.{self.name}", f"{self.name}: {text}"))
        self.events[-1].tell(log)

    @property
    def name(self) -> str:
        """What the server is called in events and logs, e.g. ``vllm-extract``."""
        return f"{self.engine}-{self.profile}" + ("-draft" if self._request.draft is not None else "")

    def begin(self) -> None:
        """Start loading, unless it is loading or loaded already."""
        if self._server is None:
            if self.profile == "extract":
                shutil.rmtree(self.staging, ignore_errors=True)
                self.staging.mkdir(parents=True)
            self._server = start(self.engine, self._request, self.context.settings)

    def ready(self, timeout: float) -> Client:
        """A client of the live server; a server that died is started anew.

        Args:
            timeout: longest wait for one answer, seconds.
        """
        if self._server is not None and self._client is not None and self._illness() is not None:
            self.stop()
        self.begin()
        server = self._server
        if server is None:
            raise EngineError(f"{self.engine} was stopped while it was being started")
        if self._client is None:
            try:
                server.wait_ready()
            except EngineError:
                self.stop()  # another attempt starts a fresh one, at the ladder's top
                raise
            finally:
                self.events += server.events
            self.seconds_to_ready.append(server.started_seconds)
            self._client = Client(server.base_url, find_engine(self.engine).dialect, timeout)
        return self._client

    def watched(self, timeout: float) -> Client:
        """As :meth:`ready`, and from now on a server that hangs is ended: requests must be told to ``flights``."""
        client = self.ready(timeout)
        if self._server is not None and self._watch is None:
            self.flights = Flights()
            self._server.state = "serving"
            self._watch = Watch(self._server, self.flights, self.config.silence_seconds)
        return client

    def death(self, error: EngineError) -> str | None:
        """Whether an error came of the server's death: why it died, or None when it lives and is itself to answer.

        A server that hangs counts as dead, and is: it was ended by its watch, or is now because a request timed out.
        """
        self._end_watch()
        server = self._server
        if server is None:
            return None
        deadline = time.monotonic() + DEATH_SHOWS_SECONDS
        while (why := server.hang or self._illness()) is None and time.monotonic() < deadline:
            if isinstance(error, EngineSilent):
                server.end_hung("hung: a request was not answered within its time limit")
            else:
                time.sleep(POLL_SECONDS)
        self._tell_hang()
        return why

    def _tell_hang(self) -> None:
        hang = self._server.hang if self._server is not None else ""
        if hang and not any(event.name == "server.hang" and event.text.endswith(hang) for event in self.events):
            self.tell("hang", hang)

    def _illness(self) -> str | None:
        try:
            if self._server is not None:
                self._server.check()
        except EngineError as error:
            return error.what
        return None

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
            self._tell_hang()

    def extractor(self, timeout: float) -> Extractor:
        """The extraction side of the live server, which is watched."""
        client = self.watched(timeout)
        engine, version = find_engine(self.engine), self.context.versions[self.engine]
        return engine.extractor(client, self._request, version)

    @property
    def server(self) -> Server | None:
        """The server, if it was started."""
        return self._server

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        return last_lines(self._server.log, LOG_LINES) if self._server is not None else "no server runs"

    def stop(self) -> None:
        """End the server and whatever it started."""
        self._end_watch()
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self.profile == "extract":
            shutil.rmtree(self.staging, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _concurrency(context: RoundContext, profile: Profile) -> int:
    config = context.config
    busiest = {
        "generate": config.generate.concurrency,
        "extract": config.extract.concurrency,
        "bench": max(config.evaluate.concurrencies),
    }
    return busiest[profile]
