"""One engine server for one purpose, started when first needed and again after it died."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from infra.engines.base import LaunchRequest, Profile, Server, start
from infra.engines.client import Client
from infra.engines.extraction import Extractor
from infra.engines.logtail import last_lines
from infra.errors import EngineError
from infra.steps.context import Round

LOG_LINES = 6


class Serving:
    """A server of the round's engine; ``begin`` returns at once, ``ready`` waits.

    Used as a context manager: at its end the server and everything it started are gone.
    """

    def __init__(self, round_: Round, profile: Profile, draft: Path | None = None) -> None:
        self.round = round_
        self.profile = profile
        self.engine = round_.config.extract.engine if profile == "extract" else round_.config.serve_with
        self.staging = round_.scratch / "staging"
        config = round_.config.engines[self.engine]
        self._request = LaunchRequest(
            target=round_.target,
            config=config,
            profile=profile,
            taps=round_.config.extract.taps if profile == "extract" else (),
            draft=draft,
            drafts=round_.config.evaluate.drafts,
            staging=self.staging if profile == "extract" else None,
            concurrency=_concurrency(round_, profile),
        )
        self.seconds_to_ready: list[float] = []
        self.failed_rungs: list[tuple[str, str]] = []
        self._server: Server | None = None
        self._client: Client | None = None

    def begin(self) -> None:
        """Start loading, unless it is loading or loaded already."""
        if self._server is None:
            if self.profile == "extract":
                shutil.rmtree(self.staging, ignore_errors=True)
                self.staging.mkdir(parents=True)
            self._server = start(self.engine, self._request, self.round.settings)

    def ready(self, timeout: float, on_progress: Callable[[str], None] | None = None) -> Client:
        """A client of the live server; a server that died is started anew.

        Args:
            timeout: longest wait for one answer, seconds.
        """
        if self._server is not None and self._client is not None and not self._answers():
            self.stop()
        self.begin()
        server = self._server
        if server is None:
            raise EngineError(f"{self.engine} was stopped while it was being started")
        if self._client is None:
            server.wait_ready(on_progress)
            self.seconds_to_ready.append(server.started_seconds)
            self.failed_rungs += server.failed_rungs
            self._client = Client(server.base_url, timeout=timeout)
        return self._client

    def _answers(self) -> bool:
        try:
            if self._server is not None:
                self._server.check()
        except EngineError:
            return False
        return True

    def extractor(self, timeout: float, on_progress: Callable[[str], None] | None = None) -> Extractor:
        """The extraction side of the live server."""
        client = self.ready(timeout, on_progress)
        config = self.round.config
        return Extractor(client, self.staging, config.extract.taps, self.round.target.shape.hidden_size)

    @property
    def server(self) -> Server | None:
        """The server, if it was started."""
        return self._server

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        return last_lines(self._server.log, LOG_LINES) if self._server is not None else "no server runs"

    def stop(self) -> None:
        """End the server and whatever it started."""
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


def _concurrency(round_: Round, profile: Profile) -> int:
    config = round_.config
    busiest = {
        "generate": config.generate.concurrency,
        "extract": config.extract.concurrency,
        "bench": max(config.evaluate.concurrencies),
    }
    return busiest[profile]
