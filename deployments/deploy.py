"""Registers the catalogue's deployments on a Prefect server, and says which of them are out of date.

The same as ``prefect deploy --prefect-file deployments/prefect.yaml --all``, several times faster: each flow is
imported once and nothing is asked. The schedules of a deployment that exists are the user's and stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deployments.catalogue import JOB_VARIABLES, PULL, Entry
from deployments.environment import POOL
from infra.errors import ConfigError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import DeploymentScheduleCreate

Schema = dict[str, Any]


@dataclass(frozen=True)
class Deployed:
    """How a deployment on the server compares with its round file."""

    name: str
    state: Literal["current", "changed", "missing", "orphan"]

    @property
    def said(self) -> str:
        """The state in words, with what to do."""
        return {
            "current": "as its file says",
            "changed": "its file has changed since it was deployed: `eagle3 deploy`",
            "missing": "not deployed: `eagle3 deploy`",
            "orphan": "deployed, but its file is gone",
        }[self.state]


def parameter_schemas(entries: Sequence[Entry], root: Path) -> dict[str, Schema]:
    """Parameter schema of each flow of ``entries``, by entrypoint; imports the flows.

    Raises:
        ConfigError: a flow's file is missing or the flow bears another name.
    """
    return {entrypoint: _schema(entrypoint, root) for entrypoint in {entry.entrypoint for entry in entries}}


def deploy(client: "SyncPrefectClient", entries: Sequence[Entry], schemas: dict[str, Schema]) -> None:
    """Create or update every deployment of ``entries``."""
    from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions

    for entry in entries:
        client.create_deployment(
            flow_id=client.create_flow_from_name(entry.flow),
            name=entry.name,
            version=entry.version,
            description=entry.description,
            tags=list(entry.tags),
            entrypoint=entry.entrypoint,
            parameters=entry.parameters,
            parameter_openapi_schema=schemas[entry.entrypoint],
            enforce_parameter_schema=True,
            pull_steps=PULL,
            work_pool_name=POOL,
            job_variables=JOB_VARIABLES,
            concurrency_limit=1,
            concurrency_options=ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
            schedules=_schedules(client, entry),
        )


def compare(client: "SyncPrefectClient", entries: Sequence[Entry]) -> list[Deployed]:
    """Every deployment of ours, on the server or in a file, and whether the two agree."""
    served = _served(client)
    result = []
    for entry in entries:
        version = served.pop(entry.full_name, None)
        state: Literal["current", "changed", "missing"] = "changed"
        if version is None:
            state = "missing"
        elif version == entry.version:
            state = "current"
        result.append(Deployed(entry.full_name, state))
    return result + [Deployed(name, "orphan") for name in sorted(served)]


def _schema(entrypoint: str, root: Path) -> Schema:
    from prefect.flows import Flow, load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    file, _, name = entrypoint.partition(":")
    if not (root / file).is_file():
        raise ConfigError(
            f"there is no {file} in {root}", expected="the checkout", fix="set EAGLE3_ROOT to the checkout"
        )
    flow: Flow[..., Any] = load_flow_from_entrypoint(f"{root / file}:{name}", use_placeholder_flow=False)
    if flow.name != name:
        raise ConfigError(f"the flow in {file} is called {flow.name!r}", expected=repr(name))
    return parameter_schema(flow).model_dump(exclude_unset=True)


def _schedules(client: "SyncPrefectClient", entry: Entry) -> "list[DeploymentScheduleCreate]":
    """Those the deployment has (the server drops what is not sent again); the catalogue's where it is new."""
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.exceptions import ObjectNotFound

    try:
        present = client.read_deployment_by_name(entry.full_name).schedules
    except ObjectNotFound:
        if entry.cron is None:
            return []
        schedule = CronSchedule(cron=entry.cron, timezone="UTC")
        return [DeploymentScheduleCreate(schedule=schedule, active=False, slug="nightly")]
    kept = {"schedule", "active", "parameters", "slug"}
    return [DeploymentScheduleCreate.model_validate(item.model_dump(include=kept)) for item in present]


def _served(client: "SyncPrefectClient") -> dict[str, str]:
    """Version of every deployment of our work pool, by full name."""
    flows = {flow.id: flow.name for flow in client.read_flows(limit=200)}
    return {
        f"{flows[item.flow_id]}/{item.name}": item.version or ""
        for item in client.read_deployments(limit=200)
        if item.work_pool_name == POOL and item.flow_id in flows
    }
