"""``eagle3 doctor``: is this machine fit, and what to do about each fault."""

import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from deployments.cli.output import Json, print_json, print_table, say
from deployments.cli.rounds import Set, open_round
from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.errors import Eagle3Error
from infra.units import size

LEAST_DISK = 5 << 30
LEAST_MEMORY = 4 << 30
LEAST_SHM = 1 << 30


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    name: str
    state: Literal["ok", "note", "fault"]
    found: str
    fix: str = ""


def doctor(
    name: Annotated[str | None, typer.Argument(help="A round to check, too: its name, or its YAML file.")] = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Check the machine, and a round if one is named; exit status 1 if something stands in the way."""
    checks = examine(Settings(), open_round(name, overrides) if name is not None else None)
    blocked = any(check.state == "fault" for check in checks)
    if as_json:
        print_json({"fit": not blocked, "checks": [asdict(check) for check in checks]})
    else:
        print_table(
            "this machine", ["what", "", "found", "what to do"], [list(asdict(check).values()) for check in checks]
        )
    raise typer.Exit(1 if blocked else 0)


def examine(settings: Settings, config: RoundConfig | None = None) -> list[Check]:
    """Every check, in the order printed; one that fails to look is a fault by itself.

    Args:
        config: a round whose target, engines, trainer and layouts are checked, too.
    """
    groups: tuple[Callable[[Settings], Iterator[Check]], ...] = (
        _python,
        _environments,
        _gpus,
        _space,
        _memory,
        _network,
        _store,
        _server,
        _leftovers,
        *((partial(_round, config),) if config is not None else ()),
    )
    checks: list[Check] = []
    for group in groups:
        try:
            checks.extend(group(settings))
        except Eagle3Error as error:
            checks.append(Check(getattr(group, "__name__", "_round").strip("_"), "fault", error.what, error.fix))
    return checks


def _python(_settings: Settings) -> Iterator[Check]:
    version = platform.python_version()
    fit = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield Check(
        "Python", "ok" if fit else "fault", f"{version} at {sys.executable}", "" if fit else "use Python 3.11 or 3.12"
    )
    system, machine = platform.system(), platform.machine()
    fit = (system, machine) == ("Linux", "x86_64")
    yield Check("platform", "ok" if fit else "fault", f"{system} {machine}", "" if fit else "use Linux on x86-64")


def _environments(settings: Settings) -> Iterator[Check]:
    from infra.environments.building import status

    for item in status(settings.cache_dir):
        if item.fault:
            fix = f"set EAGLE3_ENV_{item.name.upper().replace('-', '_')} to a whole environment, or unset it"
            yield Check(f"environment {item.name}", "fault", item.fault, fix)
        elif item.built:
            yield Check(f"environment {item.name}", "ok", f"{item.carries} at {item.path}")
        else:
            yield Check(
                f"environment {item.name}",
                "note",
                "not built",
                f"eagle3 engines install {item.name} (`eagle3 round` does it)",
            )


def _gpus(_settings: Settings) -> Iterator[Check]:
    from infra.machine.gpus.readings import gpus

    report = gpus()
    if not report.present:
        yield Check("GPUs", "note", f"{report.reason}; only rounds whose engines say `device: cpu` can run")
    for gpu in report.gpus:
        name = f"GPU {gpu.index}"
        if gpu.faults or gpu.memory_total is None or gpu.memory_used is None:
            found = "; ".join(gpu.faults) or "the driver does not tell its memory"
            yield Check(name, "fault", f"{gpu.name}: {found}", "see `eagle3 gpu`; reset the GPU or restart")
            continue
        busy = gpu.memory_used > 0.05 * gpu.memory_total
        found = f"{gpu.name}, {size(gpu.memory_used)} of {size(gpu.memory_total)} in use, {gpu.utilisation} % busy"
        if busy and not gpu.processes:
            yield Check(name, "fault", found, "no process holds that memory: a lost one did; see `eagle3 gpu`")
        elif busy:
            yield Check(name, "note", found, f"in use by pids {[pid for pid, _ in gpu.processes]}")
        else:
            yield Check(name, "ok", found)


def _space(settings: Settings) -> Iterator[Check]:
    from infra.machine.host import free_disk

    folders = {"scratch": settings.scratch_dir, "models": settings.models_dir, "environments": settings.cache_dir}
    if settings.store.startswith("file://"):
        folders = {"store": Path(settings.store.removeprefix("file://"))} | folders
    for name, folder in folders.items():
        yield _room(f"disk: {name}", folder, free_disk(folder), LEAST_DISK)
    yield _room("shared memory", Path("/dev/shm"), free_disk(Path("/dev/shm")), LEAST_SHM)


def _room(name: str, folder: Path, free: int, least: int) -> Check:
    if free >= least:
        return Check(name, "ok", f"{size(free)} free at {folder}")
    return Check(name, "fault", f"only {size(free)} free at {folder}", f"make room: at least {size(least)}")


def _memory(_settings: Settings) -> Iterator[Check]:
    from infra.machine.host import cpu_count, memory_available

    free = memory_available()
    fit = free >= LEAST_MEMORY
    fix = "" if fit else f"end other programs: a round on the CPU wants {size(LEAST_MEMORY)}"
    yield Check("memory", "ok" if fit else "fault", f"{size(free)} available, {cpu_count()} CPU cores", fix)


def _server(settings: Settings) -> Iterator[Check]:
    from deployments.api import healthy, server_version
    from deployments.record import read_record
    from infra.machine.host import port_holder, port_in_use

    record = read_record(settings)
    if record is not None and record.server.alive:
        if not healthy(record.api):
            yield Check(
                "Prefect server",
                "fault",
                f"pid {record.server.pid} does not answer at {record.api}",
                "eagle3 down, eagle3 up",
            )
            return
        yield Check("Prefect server", "ok", f"{server_version(record.api)} at {record.api}")
        alive = record.worker.alive
        yield Check(
            "Prefect worker",
            "ok" if alive else "fault",
            f"pid {record.worker.pid} {'runs' if alive else 'is dead'}",
            "" if alive else "eagle3 up",
        )
    elif port_in_use(settings.api_port):
        found = f"port {settings.api_port} is taken by {port_holder(settings.api_port)}"
        yield Check("Prefect server", "fault", found, "stop that program or set EAGLE3_API_PORT to a free port")
    else:
        stale = ", and an earlier one ended without `eagle3 down`" if record is not None else ""
        yield Check(
            "Prefect server",
            "ok",
            f"not running{stale}; port {settings.api_port} is free",
            "eagle3 down" if stale else "",
        )


def _network(_settings: Settings) -> Iterator[Check]:
    from infra.machine.network import network_faults

    faults = network_faults()
    fix = "correct these environment variables, or unset them" if faults else ""
    yield Check("proxies and certificates", "fault" if faults else "ok", "; ".join(faults) or "can be used", fix)


def _store(settings: Settings) -> Iterator[Check]:
    from infra.store.objects import ObjectStore
    from infra.store.probe import store_faults

    folder = settings.store.startswith("file://")
    if folder and not Path(settings.store.removeprefix("file://")).is_dir():
        yield Check("store", "ok", f"{settings.store}, not made yet")
        return
    if not folder and settings.store_block and "AWS_ACCESS_KEY_ID" not in os.environ:
        found = f"{settings.store}; its credentials are in the Prefect block {settings.store_block}"
        yield Check("store", "note", found, "the preflight of a round tries it")
        return
    if not folder:
        say(f"trying {settings.store} with one small object ...")
    faults = store_faults(ObjectStore(settings.store))
    for fault in faults:
        yield Check("store", "fault", fault.what, fault.fix)
    if not faults:
        yield Check("store", "ok", f"{settings.store}: write, conditional write, ranged read and delete work")


def _leftovers(settings: Settings) -> Iterator[Check]:
    from infra.machine.host import folder_bytes
    from infra.machine.processes.guarded import recorded

    orphans = [item for item in recorded(settings.run_dir) if item.alive and not item.owner_alive]
    found = ", ".join(f"{item.purpose} (pid {item.child_pid})" for item in orphans)
    yield Check(
        "processes left behind",
        "fault" if orphans else "ok",
        found or "none",
        "start a round or `eagle3 up`: it ends them first" if orphans else "",
    )
    busy = any(item.owner_alive for item in recorded(settings.run_dir))
    held = sum(map(folder_bytes, settings.scratch_dir.glob("*"))) if not busy else 0
    yield Check(
        "scratch",
        "note" if held else "ok",
        f"{size(held)} of earlier runs in {settings.scratch_dir}" if held else "empty or in use",
        "they are taken up by the next run of the same round, or delete the folder" if held else "",
    )


def _round(config: RoundConfig, settings: Settings) -> Iterator[Check]:
    """What the round cannot do anywhere, and what of it this machine cannot."""
    from infra.machine.gpus.readings import gpus
    from infra.round.checks import refusals
    from infra.round.preflight import machine_faults

    found = [*refusals(config, settings), *machine_faults(config, gpus())]
    for said in found:
        yield Check(f"round {config.name}", "fault", *_halves(said))
    if not found:
        yield Check(f"round {config.name}", "ok", "target, engines, trainer and layouts can do what it asks")


def _halves(said: str) -> tuple[str, str]:
    what, _, fix = said.partition(" To mend it: ")
    return what, fix
