"""Serve: start an engine early, so that it loads while other steps run."""

from prefect import task

from infra.round.serving import Serving
from tasks.options import STEP


@task(task_run_name="serve {server.engine} for {server.profile}", **STEP)
def begin_loading(server: Serving, needed: bool) -> None:
    """Start loading the engine in the background; it belongs to a guard process and ends with the flow."""
    if needed:
        server.begin()
