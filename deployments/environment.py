"""Environments of the Prefect processes that this project starts, and where their checkout lies."""

import os
import sys
from pathlib import Path

from infra.config.settings import Settings
from infra.environments.building import default_cache, environment_folder

CODE = Path(__file__).resolve().parents[1]
POOL = "eagle3"
HOST = "127.0.0.1"
POLL_SECONDS = 5.0
"""How often the worker that stays asks for runs: what a run waits for, and most of what an idle server does."""
OWN_POLL_SECONDS = 1.0
"""The same for the worker of one `eagle3 round`, which waits for it."""
STACK = "EAGLE3_STACK"
"""Tells the servers and workers that this project starts from a user's own; holds the folder of their record."""

LOOPS = {
    "LATE_RUNS": "30",
    "PAUSE_EXPIRATIONS": "30",
    "CLEANUP_RECONCILER": "60",
    "FOREMAN": "30",
}
"""Pause between two looks of services that Prefect runs every 5 or 15 s, in seconds: they mark runs Late, end pauses
that ran out, clean up after lost workers and mark workers offline. Silent runs, schedules and cancellation are not
among them."""


def checkout() -> Path:
    """Folder with ``flows/`` and ``deployments/rounds/``: ``EAGLE3_ROOT`` if set, else the folder of this code."""
    return Path(os.environ.get("EAGLE3_ROOT") or CODE).resolve()


def stand_in_for_flows() -> None:
    """Let this Python's own environment be that of the flows, where it is not the locked one.

    A user made it, by ``pip install -e .`` or ``uv sync``; ``EAGLE3_ENV_FLOWS`` comes first.
    """
    own = Path(sys.prefix)
    if own != environment_folder("flows", default_cache()) and (own / "bin" / "python").exists():
        os.environ.setdefault("EAGLE3_ENV_FLOWS", str(own))


def api_url(port: int) -> str:
    """Address of the API of the Prefect server on ``port``."""
    return f"http://{HOST}:{port}/api"


def ui_url(api: str) -> str:
    """Address of the UI that belongs to an API address."""
    return api.removesuffix("/api")


def server_environment(settings: Settings, port: int) -> dict[str, str]:
    """Complete environment of the Prefect server."""
    return _base(settings) | {
        STACK: str(settings.run_dir),
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # SQLite allows one writer; on a busy machine ten seconds of waiting for it (the default) are not enough.
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
        # A start that waits for its deployment's slot looks again this often.
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "5",
        **{f"PREFECT_SERVER_SERVICES_{name}_LOOP_SECONDS": seconds for name, seconds in LOOPS.items()},
    }


def worker_environment(settings: Settings, api: str, poll_seconds: float) -> dict[str, str]:
    """Complete environment of the worker, which asks for runs that often; its flow runs inherit it."""
    return client_environment(settings, api) | {
        STACK: str(settings.run_dir),
        "PREFECT_WORKER_QUERY_SECONDS": str(poll_seconds),
        # Cancelling comes over a websocket; this is how long it takes when that is down.
        "PREFECT_WORKER_CANCELLATION_POLL_SECONDS": "5",
        "PREFECT_WORKER_ENABLE_CANCELLATION": "true",
        "PREFECT_RUNNER_AUTO_INSTALL_DEPENDENCIES": "false",
    }


def client_environment(settings: Settings, api: str) -> dict[str, str]:
    """Complete environment of a ``prefect`` command that talks to ``api``."""
    return _base(settings) | {"PREFECT_API_URL": api}


def _base(settings: Settings) -> dict[str, str]:
    """This process's environment with our settings spelled out and nobody else's Prefect settings or virtualenv."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PREFECT_") and name not in ("VIRTUAL_ENV", "PYTHONHOME")
    }
    ours = {
        f"EAGLE3_{name.upper()}": str(value)
        for name, value in settings.model_dump(exclude_none=True).items()
        if value != ""
    }
    root = checkout()
    return (
        kept
        | ours
        | {
            "EAGLE3_ROOT": str(root),
            "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(root), str(CODE)])),
            "PYTHONUNBUFFERED": "1",
            "PREFECT_HOME": str(settings.prefect_home),
            "DO_NOT_TRACK": "1",
        }
    )
