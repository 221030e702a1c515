"""The Prefect server and the worker: started, found again, stopped.

Two ways to hold them: ``eagle3 up`` leaves them running for daily use (recorded in ``run_dir``, in sessions of their
own, with the user's Prefect profile pointing at them); ``eagle3 round`` keeps them for one run under guard processes,
so that they end with it however it ends. Both use the same Prefect home, so the UI of one shows the runs of the other.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from deployments import profile
from deployments.api import connect, healthy
from deployments.environment import OWN_POLL_SECONDS, STACK, api_url
from deployments.launch import SERVER_WORDS, WORKER_WORDS, bring_up, detached, guarded
from deployments.record import StackRecord, forget, read_record, running, write_record
from deployments.upkeep import cancel_all, settle
from infra.config.settings import Settings
from infra.errors import ProcessFailed
from infra.machine.detached import find
from infra.machine.host import free_port, port_holder, port_in_use
from infra.machine.locks import exclusive

log = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0
"""How long a server that runs may take to answer: on a busy machine that is no sign that it is broken."""


def up(settings: Settings) -> StackRecord:
    """Start server and worker for daily use, or bring what runs up to date.

    Raises:
        ProcessFailed: the port is taken, a round holds the stack, or a process did not come up.
        ConfigError: a round file, or Prefect's profiles file, cannot be used.
    """
    with _alone(settings):
        profile.check()
        before = read_record(settings)
        if before is not None and before.mode == "round" and before.alive:
            raise ProcessFailed(
                f"`eagle3 round` (pid {before.owner.pid}) runs its own Prefect server at {before.api}",
                fix="wait until that round has ended, then `eagle3 up`",
            )
        _end_strays(settings, before)
        if before is not None and _answers(before):
            log.info(f"the Prefect server already runs (pid {before.server.pid})")
            port = before.port
            working = before.worker if before.worker.alive else None
            server, worker = bring_up(settings, port, detached, before.server, working)
        else:
            if before is not None and (before.server.alive or before.worker.alive):
                log.info("server and worker are stopped with what they run, and started anew")
                before.stop()
            port = settings.api_port
            _require_free(port)
            server, worker = bring_up(settings, port, detached)
        earlier = profile.activate(api_url(port))
        if before is not None and before.earlier is not None:
            earlier = before.earlier
        log.info(f"profile `{profile.NAME}` is active in {earlier.file}")
        return write_record(settings, "up", port, (server.pid, worker.pid), earlier)


def down(settings: Settings) -> bool:
    """Cancel what runs, stop worker and server with all they started, restore the profile.

    Returns:
        Whether anything was running.

    Raises:
        ProcessFailed: the stack belongs to a running ``eagle3 round``.
    """
    with _alone(settings):
        record = read_record(settings)
        strays = _end_strays(settings, record)
        if record is None:
            return strays
        if record.mode == "round" and record.owner.alive:
            raise ProcessFailed(
                f"the server and worker belong to `eagle3 round` (pid {record.owner.pid})",
                fix="stop that command with Ctrl-C; they end with it",
            )
        was_alive = strays or record.server.alive or record.worker.alive
        if _answers(record):
            if record.worker.alive:
                cancel_all(record.api)
            else:
                with connect(record.api) as client:
                    settle(client)
        for name, process in (("worker", record.worker), ("server", record.server)):
            if process.alive:
                log.info(f"ending the {name} ...")
                process.stop()
                log.info(f"{name} stopped (pid {process.pid})")
        if record.earlier is not None:
            profile.restore(record.earlier)
        forget(settings)
        return was_alive


@contextmanager
def borrowed(settings: Settings) -> Iterator[str]:
    """API address of a server with a worker: those of `eagle3 up` if they run, else ones that end with this block.

    Raises:
        ProcessFailed: another ``eagle3 round`` holds its own stack, or a process did not come up.
    """
    with _alone(settings):
        record = running(settings)
        if record is not None and record.mode == "round":
            raise ProcessFailed(
                f"another `eagle3 round` (pid {record.owner.pid}) runs with its own server",
                fix="wait for it, or use `eagle3 up` and `eagle3 run` to queue several rounds",
            )
        _end_strays(settings, record)
        if record is not None:
            log.info(f"using the server and worker that `eagle3 up` started ({record.api})")
            port = record.port
            bring_up(settings, port, detached, record.server, record.worker)
        else:
            _clear(settings)
            port = free_port() if port_in_use(settings.api_port) else settings.api_port
            server, worker = bring_up(settings, port, guarded(settings), poll_seconds=OWN_POLL_SECONDS)
            write_record(settings, "round", port, (server.pid, worker.pid))
    if record is not None:
        yield record.api
        return
    try:
        yield api_url(port)
    finally:
        log.info("ending the worker and the server ...")
        worker.stop()
        server.stop()
        forget(settings)
        log.info("server and worker stopped")


@contextmanager
def _alone(settings: Settings) -> Iterator[None]:
    """One command at a time changes the stack."""
    with exclusive(settings.run_dir / "stack" / "lock", lambda: log.info("waiting for another eagle3 command ...")):
        yield


def _answers(record: StackRecord) -> bool:
    """Whether the server of ``record`` runs and answers, within ``ANSWER_SECONDS``."""
    begin, said = time.monotonic(), False
    while record.server.alive:
        if healthy(record.api):
            return True
        if time.monotonic() - begin > ANSWER_SECONDS:
            log.info(f"the Prefect server (pid {record.server.pid}) runs, but did not answer at {record.api}")
            return False
        if not said:
            said = True
            log.info(f"the Prefect server is busy: waiting up to {ANSWER_SECONDS:.0f} s for its answer ...")
        time.sleep(0.5)
    return False


def _end_strays(settings: Settings, record: StackRecord | None) -> bool:
    """End servers and workers of this state folder that no record names: the command that started them was killed.

    Only to be called while no other command changes the stack. Returns whether there were any.
    """
    known = [] if record is None else [record.server, record.worker]
    found = [
        process
        for words in (WORKER_WORDS, SERVER_WORDS)
        for process in find(STACK, str(settings.run_dir), words)
        if process not in known
    ]
    for process in found:
        process.stop()
        log.info(f"ended pid {process.pid} (prefect), left behind by a command that was killed")
    return bool(found)


def _clear(settings: Settings) -> None:
    """Take away what is left of a stack that ended without `eagle3 down`."""
    stale = read_record(settings)
    if stale is None:
        return
    stale.stop()
    if stale.earlier is not None:
        profile.restore(stale.earlier)
    forget(settings)


def _require_free(port: int) -> None:
    if not port_in_use(port):
        return
    kind = "a Prefect server that is not ours" if healthy(api_url(port)) else "another program"
    raise ProcessFailed(
        f"port {port} is taken by {kind}, {port_holder(port)}",
        expected="a free port for the Prefect server",
        fix="stop it, or choose another port with EAGLE3_API_PORT",
    )
