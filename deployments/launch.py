"""Starts a Prefect server and a worker, prepares the server, deploys; as detached or as guarded processes."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deployments.api import connect, healthy
from deployments.automations import ensure_automations, load_automations
from deployments.catalogue import catalogue
from deployments.deploy import deploy, parameter_schemas
from deployments.environment import HOST, POLL_SECONDS, POOL, api_url, checkout, server_environment, worker_environment
from deployments.upkeep import WORKER, ensure_gpu_limit, ensure_pool, settle
from infra.config.settings import Settings
from infra.errors import ProcessFailed
from infra.machine.detached import start_detached
from infra.machine.logtail import last_lines
from infra.machine.processes.guarded import Guarded, Spec, reap

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

log = logging.getLogger(__name__)

SERVER_WORDS = ("-m", "prefect", "server", "start")
WORKER_WORDS = ("-m", "prefect", "worker", "start")
START_SECONDS = 300.0
SAY_SECONDS = 10.0
"""Pause between two lines about one wait."""
# Rounds of different names may run at once; those that need the GPU wait for its slot.
WORKER_LIMIT = 4


class Handle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def alive(self) -> bool:
        """Whether it runs."""

    def stop(self, grace_seconds: float = 10.0) -> None:
        """End it and all it started."""


Launch = Callable[[str, Sequence[str], dict[str, str], Path], Handle]
"""Starts (purpose, command, environment, log)."""


def bring_up(
    settings: Settings,
    port: int,
    launch: Launch,
    server: Handle | None = None,
    worker: Handle | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> tuple[Handle, Handle]:
    """A running server and worker with everything deployed; starts what is not given.

    Args:
        poll_seconds: how often a worker that is started here asks for runs.

    Raises:
        ProcessFailed: one did not come up. What was started here is stopped again, on any error.
        ConfigError: a round file is not valid (nothing has been started then).
    """
    root, api, begin = checkout(), api_url(port), time.monotonic()
    entries, started = catalogue(root), list[Handle]()
    for item in reap(settings.run_dir):
        if item.ended:
            log.info(f"ended {item.record.purpose}, left behind by an earlier command (pids {list(item.ended)})")
    try:
        if server is None:
            server_log = settings.log_dir / "prefect-server.log"
            log.info(f"starting the Prefect server on port {port} ...")
            server = launch("Prefect server", _server_command(port), server_environment(settings, port), server_log)
            started.append(server)
        log.info("reading the flows ...")
        schemas = parameter_schemas(entries, root)
        if started:
            _wait(lambda: healthy(api), server, server_log, "the Prefect server")
            log.info(f"server answers at {api} (pid {server.pid}, {time.monotonic() - begin:.1f} s)")
        with connect(api) as client:
            ensure_pool(client)
            ensure_gpu_limit(client)
            ensure_automations(client, load_automations())
            if worker is not None:
                deploy(client, entries, schemas)
            else:
                settle(client)
                since, worker_log = datetime.now(UTC), settings.log_dir / "prefect-worker.log"
                worker = launch(
                    "Prefect worker", _worker_command(), worker_environment(settings, api, poll_seconds), worker_log
                )
                started.append(worker)
                deploy(client, entries, schemas)
                _wait(lambda: _polls(client, since), worker, worker_log, "the worker")
                log.info(f"worker polls pool {POOL} (pid {worker.pid}, {time.monotonic() - begin:.1f} s)")
        log.info(f"{len(entries)} deployments: {', '.join(entry.full_name for entry in entries)}")
    except BaseException:
        for handle in reversed(started):
            handle.stop()
        raise
    return server, worker


def detached(purpose: str, command: Sequence[str], env: dict[str, str], log: Path) -> Handle:
    """A :data:`Launch` whose processes live on when this one ends."""
    return start_detached(command, env, checkout(), log)


def guarded(settings: Settings) -> Launch:
    """A :data:`Launch` whose processes end with this one, however it ends."""

    def launch(purpose: str, command: Sequence[str], env: dict[str, str], log: Path) -> Handle:
        log.parent.mkdir(parents=True, exist_ok=True)
        spec = Spec(command=tuple(command), purpose=purpose, log=log, env=env, cwd=checkout())
        return _Guarded(Guarded.start(spec, settings.run_dir))

    return launch


class _Guarded:
    """A guarded process as a :class:`Handle`."""

    def __init__(self, process: Guarded) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self, grace_seconds: float = 10.0) -> None:
        self._process.stop(grace_seconds)


def _server_command(port: int) -> list[str]:
    return [sys.executable, *SERVER_WORDS, "--host", HOST, "--port", str(port)]


def _worker_command() -> list[str]:
    command = [sys.executable, *WORKER_WORDS, "--pool", POOL, "--type", "process"]
    return [*command, "--name", WORKER, "--limit", str(WORKER_LIMIT), "--install-policy", "never"]


def _wait(ready: Callable[[], bool], process: Handle, path: Path, what: str) -> None:
    begin = told = time.monotonic()
    deadline = begin + START_SECONDS
    while not ready():
        if time.monotonic() - told >= SAY_SECONDS:
            told = time.monotonic()
            log.info(f"waiting for {what} ({told - begin:.0f} s of at most {START_SECONDS:.0f}); its log: {path}")
        trouble = "" if process.alive else "ended while starting"
        if time.monotonic() > deadline:
            trouble = f"was not ready after {START_SECONDS:.0f} s"
        if trouble:
            raise ProcessFailed(f"{what} {trouble}; its log {path} ends with:\n{last_lines(path, 15) or '(no log)'}\n")
        time.sleep(0.2)


def _polls(client: "SyncPrefectClient", since: datetime) -> bool:
    workers = client.read_workers_for_work_pool(POOL)
    return any(item.last_heartbeat_time is not None and item.last_heartbeat_time > since for item in workers)
