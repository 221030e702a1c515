"""``eagle3 engines``: build and list the Python environments."""

from typing import Annotated

import typer

from deployments.cli.output import Json, print_json
from infra.config.settings import Settings

app = typer.Typer(no_args_is_help=True)


@app.command("install")
def install(
    name: Annotated[str, typer.Argument(help="flows, vllm-cpu, vllm-cuda, ...")], as_json: Json = False
) -> None:
    """Build an environment from its lock file; does nothing if it is already built."""
    from infra.environments.building import build

    path = build(name, Settings().cache_dir)
    if as_json:
        print_json({"name": name, "path": path})
    else:
        print(path)


@app.command("list")
def show(as_json: Json = False) -> None:
    """List the environments, whether they are built, and their sizes."""
    from deployments.cli.status import environments, show_environments

    items = environments(Settings())
    if as_json:
        print_json(items)
        return
    show_environments(items)
