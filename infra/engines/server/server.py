"""One running engine server: its ladder, readiness, health and end. The same for every engine.

starting -> loading -> ready -> serving -> stopped. Until it is ready a server is given up when it ends, when nothing
of it moves for ``stall_seconds`` (``stall.py``), or after ``ready_seconds``; then its ladder's next rung is tried.
While it serves, ``watch.py`` looks after it.
"""

import logging
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import httpx

from infra.config.round import RungConfig
from infra.config.settings import Settings
from infra.engines.launch import Launcher, LaunchRequest
from infra.engines.server.causes import port_was_taken
from infra.engines.server.evidence import gather
from infra.engines.server.freed import gpu_memory, wait_freed
from infra.engines.server.rung_memory import RungMemory
from infra.engines.server.stall import Movement, vitals
from infra.errors import EngineError
from infra.events import Event
from infra.machine.gpus.choice import device_environment
from infra.machine.host import free_port
from infra.machine.logtail import LogTail, last_lines
from infra.machine.processes.guarded import Guarded, Spec, clean_environment

log = logging.getLogger(__name__)

END_SHOWS_SECONDS = 2.0
END_POLL_SECONDS = 0.05

POLL_SECONDS = 0.2
STOP_GRACE_SECONDS = 5.0
FREED_SECONDS = 120.0
LOOKS_A_STALL = 20
PORT_TRIES = 3
State = Literal["starting", "loading", "ready", "serving", "stopped"]


class ServerHung(EngineError):
    """No rung came up, and the last one hung: another try would take as long and end the same."""


@dataclass(frozen=True)
class Failure:
    """Why a rung did not come up."""

    reason: str
    hung: bool = False
    lost_port: bool = False


class Server:
    """An engine server on this machine, on a free loopback port, under a guard process.

    The first rung is launched at once; :meth:`wait_ready` walks the rest of the ladder when one fails. The rung that
    came up here last time, for this engine version and target, comes first.

    Args:
        engine: the engine module's object.
        request: what to serve, and how.
        settings: where logs, pid files and the memory of rungs are.

    Raises:
        EngineError: the engine cannot do what is asked.
    """

    def __init__(self, engine: Launcher, request: LaunchRequest, settings: Settings) -> None:
        self.engine = engine.name
        self.version = engine.version(request.config.device, settings)
        self.purpose = f"{engine.name}-{request.profile}" + ("-draft" if request.draft is not None else "")
        self.started_seconds = 0.0
        self.state: State = "starting"
        self.hang = ""
        """Why it was ended as one that hangs, with the evidence's path; empty when it was not."""
        self._engine, self._request, self._settings = engine, request, settings
        self._memory = RungMemory(
            settings.state_dir / "rungs.json",
            f"{engine.name} {self.version} {request.config.device}",
            f"{request.target.name} {request.target.revision}",
            request.config.ladder,
        )
        self._remembered = self._memory.recall(self.purpose)
        self._order = _order(request.config.ladder, self._remembered)
        self.events: list[Event] = []
        """What happened while it started: ``server.remembered``, ``server.hang``, ``server.rung``."""
        self._failed: list[tuple[str, str]] = []
        self._ports_lost = 0
        self._process: Guarded | None = None
        # Plain HTTP to the loopback address: no proxies from the environment, no certificates to load.
        self._http = httpx.Client(timeout=5, trust_env=False, verify=False)
        on_gpus = request.config.device == "cuda"
        self._gpu_before = gpu_memory(request.devices, request.config.tensor_parallel) if on_gpus else {}
        self._launch_rung()

    @property
    def rung(self) -> str:
        """Name of the rung that runs or was tried last."""
        return self._order[min(len(self._failed), len(self._order) - 1)].name

    @property
    def failed_rungs(self) -> list[tuple[str, str]]:
        """Rungs that did not come up, each with the reason."""
        return list(self._failed)

    def wait_ready(self) -> None:
        """Wait until the server answers, going down the ladder when a rung fails; each phase of a start is logged.

        Raises:
            EngineError: no rung came up; each is named with why.
            ServerHung: the same, and the last one hung.
        """
        if self._remembered is not None and self._order != list(self._request.config.ladder):
            self._tell("remembered", f"begins with rung {self._remembered}, which worked here before")
        while (failure := self._wait_rung()) is not None:
            if failure.hung:
                self._tell("hang", f"rung {self.rung} {failure.reason}")
            if (held := self._end()) is not None:
                failure = replace(failure, reason=f"{failure.reason}; {held} than before it was launched")
            self._go_on(failure)
        self.state = "ready"
        self._check_version()
        self._memory.keep(self.purpose, self.rung)

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
            # A killed server refuses connections a moment before its end is seen here.
            if (status := self._end_within(END_SHOWS_SECONDS)) is not None:
                raise EngineError(f"{self.purpose} ended: {self._why(status)}", fix=f"read {self.log}") from error
            raise EngineError(f"{self.purpose} does not answer: {error}", fix=f"read {self.log}") from error
        if answer.status_code >= 500:
            why = self._engine.cause(last_lines(self.log)) or "its engine is dead"
            raise EngineError(f"{self.purpose} answers {answer.status_code}: {why}", fix=f"read {self.log}")

    def _end_within(self, seconds: float) -> int | None:
        """Exit status of the server's process, waited for so long; None while it lives."""
        deadline = time.monotonic() + seconds
        while self._process is not None:
            if (status := self._process.poll()) is not None or time.monotonic() > deadline:
                return status
            time.sleep(END_POLL_SECONDS)
        return None

    @property
    def ended(self) -> bool:
        """Whether the server's process is gone, by itself or stopped."""
        process = self._process
        return process is None or process.poll() is not None

    def page(self, path: str, seconds: float = 5.0) -> str | None:
        """A page of the server's, such as ``/metrics``; None when it does not give it within so many seconds."""
        try:
            answer = self._http.get(f"{self.base_url}{path}", timeout=seconds)
        except (httpx.TransportError, RuntimeError):  # the latter when the server was stopped meanwhile
            return None
        return answer.text if answer.status_code == 200 else None

    def end_hung(self, why: str) -> str:
        """Take evidence of a server that hangs and end it whole, whatever comes of the evidence.

        Returns ``why`` with the evidence's path, or with what kept it from being written (a full disk, say).
        May be called from another thread than the one that waits for the server.
        """
        process = self._process
        if process is None:
            return why
        try:
            self.hang = f"{why}; evidence: {gather(process.guard_pid, self.log, why)}"
        except OSError as error:
            self.hang = f"{why}; no evidence: {error}"
        finally:
            process.stop(grace_seconds=0.0)
        return self.hang

    def stop(self) -> None:
        """End the whole process tree, for good; harmless when it has ended.

        Returns when its GPUs' memory is free, too, so that whoever comes next finds it; after 120 s in any case.
        """
        self._end()
        self._http.close()

    def _end(self) -> str | None:
        """End the process tree and wait for its memory; what is held all the same, None when nothing is."""
        self.state = "stopped"
        if self._process is None:
            return None
        self._process.stop(grace_seconds=STOP_GRACE_SECONDS)
        self._process = None
        return wait_freed(self._gpu_before, FREED_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch_rung(self) -> None:
        rung = self._order[len(self._failed)]
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        launch = self._engine.launch(self._request, rung, port, self._settings)
        self._served_name = launch.served_name
        self.log = self._log_path(rung.name, port)
        spec = Spec(
            command=launch.command,
            purpose=self.purpose,
            log=self.log,
            env=clean_environment({**device_environment(self._request.devices), **launch.env}),
            cwd=self.log.parent,
        )
        self.state, self.hang = "starting", ""
        self._started = time.monotonic()
        self._process = Guarded.start(spec, self._settings.run_dir)

    def _log_path(self, rung: str, port: int) -> Path:
        self._settings.log_dir.mkdir(parents=True, exist_ok=True)
        return self._settings.log_dir / f"{self.purpose}-{datetime.now():%Y%m%d-%H%M%S}-{rung}-{port}.log"

    def _wait_rung(self) -> Failure | None:
        """None when the rung answers, else why it does not."""
        process, config = self._process, self._request.config
        assert process is not None
        tail, phase = LogTail(self.log), "starting Python"
        log.info(f"{self.purpose}: {phase}")
        movement = Movement(
            lambda: vitals(process.guard_pid, self.log, config.device == "cuda"),
            every=config.stall_seconds / LOOKS_A_STALL,
        )
        while True:
            status, answers = process.poll(), self._answers()
            for line in tail.lines():
                words = self._engine.phase(line)
                if words is not None and words != phase:
                    phase, self.state = words, "loading"
                    log.info(f"{self.purpose}: {phase}")
            if status is not None:
                return Failure(self._why(status), lost_port=port_was_taken(last_lines(self.log)))
            if answers:
                self.started_seconds = time.monotonic() - self._started
                return None
            if (why := self._too_slow(movement, phase)) is not None:
                return why
            time.sleep(POLL_SECONDS)

    def _too_slow(self, movement: Movement, phase: str) -> Failure | None:
        """Why a server that neither answers nor has ended is given up now, with evidence; None while it may go on."""
        config = self._request.config
        still, waited = movement.still_seconds(), time.monotonic() - self._started
        if still > config.stall_seconds:
            why = (
                f"hung while {phase}: in {still:.0f} s no line in its log, no growth of its memory, nothing read, "
                "no port opened"
            )
            return Failure(self.end_hung(why), hung=True)
        if waited > config.ready_seconds:
            last = last_lines(self.log, 1).strip()[-200:]
            why = f"not ready after {config.ready_seconds:.0f} s, while {phase}; its log ends: {last}"
            return Failure(self.end_hung(why))
        return None

    def _go_on(self, failure: Failure) -> None:
        """Launch the next attempt: the same rung when only its port was taken, else the next one."""
        if failure.lost_port and self._ports_lost < PORT_TRIES:
            self._ports_lost += 1
            self._tell("rung", f"rung {self.rung} lost its port to another process; trying it once more")
            self._launch_rung()
            return
        name, reason, path = self.rung, failure.reason, self.log
        self._failed.append((name, reason))
        if len(self._failed) == len(self._order):
            self._failed_for_good(path, failure.hung)
        self._tell("rung", f"rung {name} failed ({reason}); trying {self.rung}")
        self._launch_rung()

    def _tell(self, what: Literal["remembered", "hang", "rung"], text: str) -> None:
        self.events.append(Event(f"server.{what}", f"server.{self.purpose}", f"{self.purpose}: {text}"))
        self.events[-1].tell(log)

    def _answers(self) -> bool:
        """Whether healthy, and the very server that was launched: the port may have gone to somebody else."""
        try:
            if self._http.get(f"{self.base_url}/health").status_code != 200:
                return False
            models = self._http.get(f"{self.base_url}/v1/models").json()
            return any(model.get("id") == self._served_name for model in models.get("data", []))
        except (httpx.TransportError, ValueError, AttributeError, TypeError):
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

    def _failed_for_good(self, path: Path, hung: bool) -> None:
        tried = "; ".join(f"{name}: {reason}" for name, reason in self._failed)
        raise (ServerHung if hung else EngineError)(
            f"{self.purpose} did not start with any rung of its ladder ({tried})",
            expected=f"an answer within {self._request.config.ready_seconds:.0f} s",
            fix=f"read {path}, or add a rung that works here to the round's engine",
        )


def _order(ladder: tuple[RungConfig, ...], first: str | None) -> list[RungConfig]:
    """The ladder, the rung called ``first`` before the others."""
    return sorted(ladder, key=lambda rung: rung.name != first)
