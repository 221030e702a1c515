"""``eagle3 up``, ``down`` and ``deploy``."""

from typing import Annotated

import typer

from deployments.cli.output import Json, print_json, say
from infra.config.settings import Settings
from infra.errors import ProcessFailed


def up(as_json: Json = False) -> None:
    """Start the Prefect server and a worker for daily use, deploy everything, activate Prefect profile `eagle3`."""
    from deployments.environment import ui_url
    from deployments.stack import up as start_stack

    record = start_stack(Settings())
    facts = {
        "api": record.api,
        "ui": ui_url(record.api),
        "server_pid": record.server.pid,
        "worker_pid": record.worker.pid,
        "started_at": record.started_at,
    }
    if as_json:
        print_json(facts)
        return
    print(f"UI: {facts['ui']}\nStart a round: prefect deployment run eagle3/smoke --watch\nStop: eagle3 down")


def down(as_json: Json = False) -> None:
    """Cancel what runs, stop worker and server with all they started, restore the earlier Prefect profile."""
    from deployments.stack import down as stop_stack

    stopped = stop_stack(Settings())
    if as_json:
        print_json({"stopped": stopped})
    elif not stopped:
        print("nothing was running")


def deploy(
    render: Annotated[
        bool, typer.Option("--render", help="Only rewrite deployments/prefect.yaml from the round files.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Deploy every round again on the running server (after a change to a round file or to the flows)."""
    from deployments.catalogue import PREFECT_YAML, catalogue
    from deployments.catalogue import render as render_yaml

    entries = catalogue()
    if render:
        PREFECT_YAML.write_text(render_yaml(entries))
        say(f"wrote {PREFECT_YAML} ({len(entries)} deployments)")
        if as_json:
            print_json({"rendered": PREFECT_YAML, "deployments": [entry.full_name for entry in entries]})
        return
    from deployments.api import connect
    from deployments.deploy import deploy as deploy_all
    from deployments.deploy import parameter_schemas
    from deployments.environment import checkout
    from deployments.record import running

    record = running(Settings())
    if record is None:
        raise ProcessFailed("no Prefect server of ours is running", fix="eagle3 up (it deploys as well)")
    say("reading the flows ...")
    schemas = parameter_schemas(entries, checkout())
    with connect(record.api) as client:
        deploy_all(client, entries, schemas)
    names = [entry.full_name for entry in entries]
    if as_json:
        print_json({"deployed": names})
    else:
        say(f"deployed {', '.join(names)}")
