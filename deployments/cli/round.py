"""``eagle3 round``: the main job, from nothing running to a printed acceptance table; and ``eagle3 run``."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from typing import Annotated, Any

import typer

from deployments.cli.output import Json, print_json, say
from deployments.cli.rounds import Set, open_deployed, parse_overrides
from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.errors import ProcessFailed

CANCEL_SECONDS = 60.0
SILENT_SECONDS = 300.0
"""How long a run is still believed in whose server does not answer: a busy machine can keep it from that."""
POLL_SECONDS = 2.0
SAY_SECONDS = 10.0
"""Pause between two lines about one wait."""
Name = Annotated[str, typer.Argument(help="Name of a round: a file in deployments/rounds without its ending.")]


def run_round(name: Name, overrides: Set = None, as_json: Json = False) -> None:
    """Run a whole round: environments, server and worker, the flow, the acceptance table; leaves nothing running.

    Uses the server and worker of `eagle3 up` if they run. Ctrl-C cancels the run.
    """
    from deployments.cli.acceptance import read_report, show
    from deployments.environment import api_url, ui_url
    from deployments.record import running
    from deployments.stack import borrowed

    settings, began = Settings(), time.monotonic()
    config = open_deployed(name, overrides)
    say(f"round {config.name}: {config.description or 'no description'}")
    say(f"1 of 3: the environments of {' and '.join(config.used_engines)}; what is missing is built")
    build_environments(config, settings)
    say("2 of 3: a Prefect server and a worker")
    with borrowed(settings) as api:
        say("3 of 3: the round itself; what is done already is not done again")
        say(f"UI while it runs: {ui_url(api)}")
        run_id, state = _watch(api, config.name, parse_overrides(overrides), settings)
    say(f"run {run_id} ended {state} after {time.monotonic() - began:.0f} s in all")
    found = read_report(settings, config.name) if state == "Completed" else None
    if as_json:
        report = None if found is None else found[0].model_dump(mode="json") | {"where": found[1]}
        print_json({"round": config.name, "run": run_id, "state": state, "report": report})
    else:
        if found is not None:
            show(*found)
        still = running(settings)
        place = ui_url(still.api) if still else f"`eagle3 up`, then {ui_url(api_url(settings.api_port))}"
        print(f"To look at the run again: {place}/runs/flow-run/{run_id}")
    if state != "Completed":
        raise ProcessFailed(
            f"round {config.name} ended {state or 'unknown'}",
            fix=f"read what is above, then `eagle3 round {name}` again: it resumes",
        )


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
    from prefect.exceptions import ObjectNotFound

    with connect(record.api) as client:
        for item in compare(client, catalogue()):
            if item.name == f"eagle3/{config.name}" and item.state != "current":
                say(f"{item.name}: {item.said}")
        try:
            deployment = client.read_deployment_by_name(f"eagle3/{config.name}")
        except ObjectNotFound as error:
            raise ProcessFailed(f"the server has no deployment eagle3/{config.name}", fix="eagle3 deploy") from error
        run = client.create_flow_run_from_deployment(
            deployment.id, parameters={"overrides": parse_overrides(overrides)} if overrides else {}
        )
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


def _watch(api: str, name: str, overrides: dict[str, Any], settings: Settings) -> tuple[str, str]:
    """Run ``prefect deployment run eagle3/NAME --watch``, pass its output on; the run's id and final state's name.

    The run is the worker's, not the watcher's: where that one ends early, the run is waited for all the same.
    """
    from deployments.environment import client_environment

    command = [sys.executable, "-m", "prefect", "deployment", "run", f"eagle3/{name}", "--watch"]
    if overrides:
        command += ["--param", f"overrides={json.dumps(overrides)}"]
    say(f"prefect {' '.join(command[3:])}")
    # A session of its own: Ctrl-C must reach the run as a cancellation, not as the end of the one who watches it.
    child = subprocess.Popen(
        command,
        env=client_environment(settings, api) | {"COLUMNS": os.environ.get("COLUMNS", "160")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    run_id = ""
    try:
        assert child.stdout is not None
        for line in child.stdout:
            found = re.search(r"UUID: ([0-9a-f-]{36})", line)
            run_id = run_id or (found[1] if found else "")
            if "Parameters: {" not in line:
                print(line, end="", file=sys.stderr, flush=True)
        status = child.wait()
        if not run_id:
            raise ProcessFailed(f"`prefect deployment run eagle3/{name}` started no run (exit status {status})")
        return run_id, _end_of(api, run_id, f"`prefect deployment run --watch` ended with exit status {status}")
    except KeyboardInterrupt:
        if run_id:
            _cancel(api, run_id)
        raise
    finally:
        child.terminate()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _end_of(api: str, run_id: str, why: str) -> str:
    """Name of the run's final state, waited for; ``why`` is said when it is not final yet.

    Raises:
        ProcessFailed: the server did not answer for ``SILENT_SECONDS``.
    """
    answered, said = time.monotonic(), False
    while True:
        try:
            name, final = _state(api, run_id)
            answered = time.monotonic()
        except ProcessFailed:
            if time.monotonic() - answered > SILENT_SECONDS:
                raise
            name, final = "not to be learnt", False
        if final:
            return name
        if not said:
            said = True
            say(f"{why}, and run {run_id} is {name}: it is waited for")
        time.sleep(POLL_SECONDS)


def _cancel(api: str, run_id: str) -> None:
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
    begin = told = time.monotonic()
    with suppress(KeyboardInterrupt):
        while True:
            with suppress(ProcessFailed):  # a busy server: it is asked again
                name, final = _state(api, run_id)
                if final:
                    say(f"run {run_id} is {name}")
                    return
            now = time.monotonic()
            if now - begin > CANCEL_SECONDS:
                say(f"the run did not end within {CANCEL_SECONDS:.0f} s; it ends with the worker")
                return
            if now - told >= SAY_SECONDS:
                told = now
                say(f"waiting for the run to end its engines ({now - begin:.0f} s of at most {CANCEL_SECONDS:.0f})")
            time.sleep(0.3)


def _state(api: str, run_id: str) -> tuple[str, bool]:
    """Name of the run's state, and whether it is final."""
    from uuid import UUID

    from deployments.api import connect

    with connect(api) as client:
        state = client.read_flow_run(UUID(run_id)).state
    return (state.name or state.type.value, state.is_final()) if state is not None else ("unknown", False)
