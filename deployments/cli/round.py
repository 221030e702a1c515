"""``eagle3 round``: the main job, from nothing running to a printed acceptance table; and ``eagle3 run``."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from deployments.cli.follow import follow, state_of
from deployments.cli.output import Json, print_json, say, show
from deployments.cli.rounds import Set, open_deployed, parse_overrides
from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.errors import Eagle3Error, ProcessFailed
from infra.units import duration

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

CANCEL_SECONDS = 60.0
Name = Annotated[str, typer.Argument(help="Name of a round: a file in deployments/rounds without its ending.")]


def run_round(name: Name, overrides: Set = None, as_json: Json = False) -> None:
    """Run a whole round: environments, target, server and worker, the flow, the acceptance table.

    Leaves nothing running, and starts nothing where all of it is there. Uses the server and worker of `eagle3 up` if
    they run. Ctrl-C cancels the run.
    """
    from deployments.cli import acceptance
    from infra.round.context import RoundContext
    from infra.steps.plan import in_brief, make_plan

    settings = Settings()
    config = open_deployed(name, overrides)
    say(f"round {config.name}: {config.description or 'no description'}")
    run_id, state = "", "Completed"
    if finished(config, settings):
        say(f"every step of it is done; `eagle3 run {config.name}` goes through them once more")
    else:
        with suppress(Eagle3Error):  # what the plan cannot do without, the run says
            say(in_brief(make_plan(RoundContext(config, settings))))
        run_id, state = _run(config, parse_overrides(overrides), settings)
    found = acceptance.read_report(settings, config.name) if state == "Completed" else None
    if as_json:
        report = None if found is None else found[0].model_dump(mode="json") | {"where": found[1]}
        print_json({"round": config.name, "run": run_id or None, "state": state, "report": report})
    else:
        if found is not None:
            acceptance.show(*found)
        if run_id:
            print(f"To look at the run again: {_place(settings)}/runs/flow-run/{run_id}")
    if state != "Completed":
        raise ProcessFailed(
            f"round {config.name} ended {state or 'unknown'}",
            fix=f"read what is above, then `eagle3 round {name}` again: it resumes",
        )


def finished(config: RoundConfig, settings: Settings) -> bool:
    """Whether the round is done and its results are the live ones, so that a run would change nothing."""
    from infra.round.context import RoundContext
    from infra.round.status import look
    from infra.round.stored import all_live

    try:
        context = RoundContext(config, settings)
        return look(context).finished and all_live(context)
    except Eagle3Error:  # no target or no engine yet, or a store that is not fit: the run says so
        return False


def _run(config: RoundConfig, overrides: dict[str, Any], settings: Settings) -> tuple[str, str]:
    """Set up what is missing and run the flow; (the run's id, the name of its final state)."""
    from deployments.api import connect
    from deployments.environment import ui_url
    from deployments.stack import borrowed

    began = time.monotonic()
    say(f"1 of 2: {' and '.join(config.used_engines)}, the target, and a Prefect server with a worker")
    with _fetching(config, settings) as fetched, borrowed(settings) as api:
        build_environments(config, settings)
        fetched()
        say(f"2 of 2: the round itself; its log: {ui_url(api)}")
        with connect(api) as client:
            run = create_run(client, config.name, overrides)
        try:
            state = follow(api, run.id)
        except KeyboardInterrupt:
            _cancel(api, run.id)
            raise
    say(f"run {run.name} ended {state} after {duration(time.monotonic() - began)} in all")
    return str(run.id), state


@contextmanager
def _fetching(config: RoundConfig, settings: Settings) -> Iterator[Callable[[], None]]:
    """Fetch the target in a process beside; what this yields waits for it.

    What it cannot fetch is left to the run, which says why.
    """
    target = config.target
    if not (target.fetch and target.source) or (settings.models_dir / target.name / "config.json").is_file():
        yield lambda: None
        return
    from infra.machine.processes.guarded import Guarded, Spec

    command = (sys.executable, "-m", "deployments.cli", "target", "fetch", config.name)
    fetch_log = settings.log_dir / "target-fetch.log"
    fetch_log.parent.mkdir(parents=True, exist_ok=True)
    # In this process's own folder, where relative settings begin, but with no code from there.
    env = os.environ | {"PYTHONSAFEPATH": "1"}
    spec = Spec(command=command, purpose="target fetch", log=fetch_log, env=env)
    say(f"fetching {target.name} meanwhile; its log: {fetch_log}")
    with Guarded.start(spec, settings.run_dir) as process:

        def wait() -> None:
            while process.wait(timeout=1.0) is None:
                show(f"fetching {target.name}")
            said = "here" if process.poll() == 0 else "could not be fetched; the run will try again"
            say(f"target {target.name}: {said}")

        yield wait


def _place(settings: Settings) -> str:
    """Where the UI is, or how to get it."""
    from deployments.environment import api_url, ui_url
    from deployments.record import running

    still = running(settings)
    return ui_url(still.api) if still else f"`eagle3 up`, then {ui_url(api_url(settings.api_port))}"


def create_run(client: "SyncPrefectClient", name: str, overrides: dict[str, Any]) -> "FlowRun":
    """Put a run of the round's deployment into the queue.

    Raises:
        ProcessFailed: the server has no such deployment.
    """
    from prefect.exceptions import ObjectNotFound

    try:
        deployment = client.read_deployment_by_name(f"eagle3/{name}")
    except ObjectNotFound as error:
        raise ProcessFailed(f"the server has no deployment eagle3/{name}", fix="eagle3 deploy") from error
    parameters = {"overrides": overrides} if overrides else {}
    return client.create_flow_run_from_deployment(deployment.id, parameters=parameters)


def start(name: Name, overrides: Set = None, as_json: Json = False) -> None:
    """Start a round on the server of `eagle3 up` and come back at once; a second start of it waits in the queue."""
    from deployments.api import connect
    from deployments.catalogue import catalogue
    from deployments.deploy import compare
    from deployments.environment import ui_url
    from deployments.record import running

    config = open_deployed(name, overrides)
    record = running(Settings())
    if record is None:
        raise ProcessFailed("no Prefect server of ours is running", fix=f"eagle3 up, or eagle3 round {name}")
    with connect(record.api) as client:
        for item in compare(client, catalogue()):
            if item.name == f"eagle3/{config.name}" and item.state != "current":
                say(f"{item.name}: {item.said}")
        run = create_run(client, config.name, parse_overrides(overrides))
    facts = {"run": str(run.id), "name": run.name, "url": f"{ui_url(record.api)}/runs/flow-run/{run.id}"}
    if as_json:
        print_json(facts)
    else:
        print(f"run {facts['name']} is in the queue: {facts['url']}")


def build_environments(config: RoundConfig, settings: Settings) -> None:
    """Build the environment of each engine the round uses, where it is missing."""
    from infra.environments.building import build

    for engine in config.used_engines:
        name = f"{engine}-{config.engines[engine].device}"
        begin = time.monotonic()
        build(name, settings.cache_dir)
        say(f"environment {name} is ready ({time.monotonic() - begin:.1f} s)")


def _cancel(api: str, run_id: UUID) -> None:
    """Cancel the run and wait until it has ended, so that its engines and trainer are gone."""
    from prefect.states import Cancelling

    from deployments.api import connect

    say("cancelling the run ...")
    try:
        with connect(api) as client:
            client.set_flow_run_state(run_id, Cancelling(message="stopped by the person who started it"))
    except ProcessFailed as error:
        say(f"the run could not be cancelled, it ends with the worker: {error.what}")
        return
    begin = time.monotonic()
    with suppress(KeyboardInterrupt):
        while (now := time.monotonic()) - begin <= CANCEL_SECONDS:
            with suppress(ProcessFailed), connect(api) as client:  # a busy server: it is asked again
                name, final = state_of(client, run_id)
                if final:
                    say(f"run {run_id} is {name}")
                    return
            show(f"waiting for the run to end its engines ({now - begin:.0f} s of at most {CANCEL_SECONDS:.0f})")
            time.sleep(0.3)
        say(f"the run did not end within {CANCEL_SECONDS:.0f} s; it ends with the worker")
