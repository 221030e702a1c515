"""One running engine server: its ladder, readiness, health and end. The same for every engine."""

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from infra.config.settings import Settings
from infra.engines.launch import Engine, LaunchRequest
from infra.engines.logtail import LogTail, last_lines
from infra.errors import EngineError
from infra.machine.host import free_port
from infra.machine.processes import Guarded, Spec, clean_environment

POLL_SECONDS = 0.2
STOP_GRACE_SECONDS = 5.0


class Server:
    """An engine server on this machine, on a free loopback port, under a guard process.

    The first rung is launched at once; :meth:`wait_ready` walks the rest of the ladder when one fails.

    Args:
        engine: the engine module's object.
        request: what to serve, and how.
        settings: where logs and pid files go.

    Raises:
        EngineError: the engine cannot do what is asked.
    """

    def __init__(self, engine: Engine, request: LaunchRequest, settings: Settings) -> None:
        self.engine = engine.name
        self.version = engine.version(request.config.device, settings)
        self.purpose = f"{engine.name}-{request.profile}" + ("-draft" if request.draft is not None else "")
        self.started_seconds = 0.0
        self._engine, self._request, self._settings = engine, request, settings
        self._failed: list[tuple[str, str]] = []
        self._process: Guarded | None = None
        # Plain HTTP to the loopback address: no proxies from the environment, no certificates to load.
        self._http = httpx.Client(timeout=5, trust_env=False, verify=False)
        self._launch_rung()

    @property
    def rung(self) -> str:
        """Name of the rung that runs or was tried last."""
        ladder = self._request.config.ladder
        return ladder[min(len(self._failed), len(ladder) - 1)].name

    @property
    def failed_rungs(self) -> list[tuple[str, str]]:
        """Rungs that did not come up, each with the reason."""
        return list(self._failed)

    def wait_ready(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Wait until the server answers, going down the ladder when a rung fails.

        Args:
            on_progress: called with a few words whenever starting up enters another phase.

        Raises:
            EngineError: no rung came up; each is named with why.
        """
        report = on_progress or (lambda words: None)
        while (reason := self._wait_rung(report)) is not None:
            self._end()
            name, log = self.rung, self.log
            self._failed.append((name, reason))
            if len(self._failed) == len(self._request.config.ladder):
                self._failed_for_good(log)
            report(f"rung {name} failed ({reason}); trying {self.rung}")
            self._launch_rung()
        self._check_version()

    def check(self) -> None:
        """Make sure that the server still runs and still calls itself healthy.

        A server too busy to answer within the time limit counts as running.

        Raises:
            EngineError: it ended, or says that its engine is dead.
        """
        if self._process is None:
            raise EngineError(f"{self.purpose} is stopped")
        if (status := self._process.poll()) is not None:
            raise EngineError(f"{self.purpose} ended: {self._why(status)}", fix=f"read {self.log}")
        try:
            answer = self._http.get(f"{self.base_url}/health", timeout=10)
        except httpx.TimeoutException:
            return
        except httpx.TransportError as error:
            raise EngineError(f"{self.purpose} does not answer: {error}", fix=f"read {self.log}") from error
        if answer.status_code >= 500:
            why = self._engine.cause(last_lines(self.log)) or "its engine is dead"
            raise EngineError(f"{self.purpose} answers {answer.status_code}: {why}", fix=f"read {self.log}")

    def stop(self) -> None:
        """End the whole process tree, for good; harmless when it has ended."""
        self._end()
        self._http.close()

    def _end(self) -> None:
        if self._process is not None:
            self._process.stop(grace_seconds=STOP_GRACE_SECONDS)
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch_rung(self) -> None:
        rung = self._request.config.ladder[len(self._failed)]
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        launch = self._engine.launch(self._request, rung, port, self._settings)
        self._served_name = launch.served_name
        self.log = self._log_path(rung.name, port)
        spec = Spec(
            command=launch.command,
            purpose=self.purpose,
            log=self.log,
            env=clean_environment(launch.env),
            cwd=self.log.parent,
        )
        self._started = time.monotonic()
        self._process = Guarded.start(spec, self._settings.run_dir)

    def _log_path(self, rung: str, port: int) -> Path:
        self._settings.log_dir.mkdir(parents=True, exist_ok=True)
        return self._settings.log_dir / f"{self.purpose}-{datetime.now():%Y%m%d-%H%M%S}-{rung}-{port}.log"

    def _wait_rung(self, report: Callable[[str], None]) -> str | None:
        """None when the rung answers, else why it does not."""
        tail, phase = LogTail(self.log), "starting Python"
        report(phase)
        deadline = self._started + self._request.config.ready_seconds
        assert self._process is not None
        while True:
            status, answers = self._process.poll(), self._answers()
            for line in tail.lines():
                words = self._engine.phase(line)
                if words is not None and words != phase:
                    phase = words
                    report(phase)
            if status is not None:
                return self._why(status)
            if answers:
                self.started_seconds = time.monotonic() - self._started
                return None
            if time.monotonic() > deadline:
                seconds = self._request.config.ready_seconds
                last = last_lines(self.log, 1).strip()[-200:]
                return f"not ready after {seconds:.0f} s, while {phase}; its log ends: {last}"
            time.sleep(POLL_SECONDS)

    def _answers(self) -> bool:
        """Whether healthy, and the very server that was launched: the port may have gone to somebody else."""
        try:
            if self._http.get(f"{self.base_url}/health").status_code != 200:
                return False
            models = self._http.get(f"{self.base_url}/v1/models").json()
            return any(model.get("id") == self._served_name for model in models.get("data", []))
        except (httpx.TransportError, ValueError):
            return False

    def _why(self, status: int) -> str:
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        cause = self._engine.cause(last_lines(self.log))
        if cause is None and status == -9:
            cause = "killed from outside, most often by the kernel when memory runs out"
        return f"{cause} ({how})" if cause else f"{how}, and its log does not say why"

    def _check_version(self) -> None:
        served = self._engine.served_version(self.base_url)
        if served != self.version:
            self.stop()
            raise EngineError(
                f"{self.purpose} serves with {self.engine} {served}",
                expected=f"version {self.version}, which its environment's metadata names",
                fix="build the environment anew",
            )

    def _failed_for_good(self, log: Path) -> None:
        tried = "; ".join(f"{name}: {reason}" for name, reason in self._failed)
        raise EngineError(
            f"{self.purpose} did not start with any rung of its ladder ({tried})",
            expected=f"an answer within {self._request.config.ready_seconds:.0f} s",
            fix=f"read {log}, or add a rung that works here to the round's engine",
        )
