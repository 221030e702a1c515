"""``eagle3 status``: what runs, what waits, what is out of date."""

from typing import Any

from deployments.cli.output import Json, print_json, print_table
from infra.config.settings import Settings
from infra.units import size


def status(as_json: Json = False) -> None:
    """Say what runs: server, worker, runs, processes, environments, deployments."""
    facts = collect(Settings())
    if as_json:
        print_json(facts)
        return
    print_table("server and worker", ["what", "pid", "state"], _stack_rows(facts["stack"]))
    if facts["stack"]["answers"]:
        rows = [(run["name"], run["deployment"], run["state"], run["since"]) for run in facts["runs"]]
        print_table("runs", ["run", "deployment", "state", "since (UTC)"], rows)
        print_table(
            "deployments", ["deployment", "state"], [(item["name"], item["said"]) for item in facts["deployments"]]
        )
    rows = [(item["purpose"], item["pid"], item["owner"], item["state"]) for item in facts["processes"]]
    print_table("processes of rounds", ["purpose", "pid", "owner", "state"], rows)
    show_environments(facts["environments"])


def collect(settings: Settings) -> dict[str, Any]:
    """Everything ``status`` says, as plain data."""
    from deployments.api import healthy
    from deployments.record import read_record

    record = read_record(settings)
    answers = record is not None and record.server.alive and healthy(record.api)
    stack: dict[str, Any] = {"recorded": record is not None, "answers": answers}
    if record is not None:
        stack |= {
            "api": record.api,
            "mode": record.mode,
            "server": {"pid": record.server.pid, "alive": record.server.alive},
            "worker": {"pid": record.worker.pid, "alive": record.worker.alive},
        }
    facts = {"stack": stack, "processes": _processes(settings), "environments": environments(settings)}
    return facts | (_served(record.api) if record is not None and answers else {"runs": [], "deployments": []})


def environments(settings: Settings) -> list[dict[str, Any]]:
    """The Python environments: name, whether built, size in bytes, path, version of what they carry."""
    from infra.environments.building import status as environment_status

    return [
        {
            "name": item.name,
            "state": item.fault or ("built" if item.built else "not built"),
            "path": item.path,
            "bytes": item.bytes or 0,
            "carries": item.carries,
            "version": item.version,
        }
        for item in environment_status(settings.cache_dir)
    ]


def show_environments(items: list[dict[str, Any]]) -> None:
    """Print what :func:`environments` gave; a size that was not measured is left empty."""
    rows = [
        (item["name"], item["state"], item["carries"], size(item["bytes"]) if item["bytes"] else "", item["path"])
        for item in items
    ]
    print_table("environments", ["name", "state", "carries", "size", "path"], rows)


def _served(api: str) -> dict[str, Any]:
    from deployments.api import LIVE, connect, runs
    from deployments.catalogue import catalogue
    from deployments.deploy import compare
    from deployments.upkeep import WAITING

    with connect(api) as client:
        names = {item.id: item.name for item in client.read_deployments(limit=200)}
        found = runs(client, LIVE) + runs(client, ["SCHEDULED"], WAITING)
        deployments = compare(client, catalogue())
    return {
        "runs": [
            {
                "id": run.id,
                "name": run.name,
                "deployment": names.get(run.deployment_id) if run.deployment_id else None,
                "state": run.state_name,
                "since": f"{run.state.timestamp:%Y-%m-%d %H:%M:%S}" if run.state else "",
            }
            for run in found
        ],
        "deployments": [{"name": item.name, "state": item.state, "said": item.said} for item in deployments],
    }


def _processes(settings: Settings) -> list[dict[str, Any]]:
    from infra.machine.processes.guarded import recorded

    return [
        {
            "purpose": item.purpose,
            "pid": item.child_pid,
            "owner": item.owner_pid,
            "state": ("runs" if item.alive else "ended") + ("" if item.owner_alive else ", its owner is dead"),
            "started": item.started,
        }
        for item in recorded(settings.run_dir)
    ]


def _stack_rows(stack: dict[str, Any]) -> list[tuple[Any, ...]]:
    if not stack["recorded"]:
        return [("server", None, "not running: `eagle3 up`"), ("worker", None, "not running")]
    rows = []
    for name in ("server", "worker"):
        alive = stack[name]["alive"]
        rows.append((name, stack[name]["pid"], "runs" if alive else "dead: `eagle3 up` starts it again"))
    if stack["server"]["alive"]:
        rows.append(("API", None, stack["api"] + ("" if stack["answers"] else " does not answer")))
    return rows
