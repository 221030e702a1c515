"""A Prefect client for one server, whatever profile or cloud login the user has."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.request import ProxyHandler, build_opener

from infra.errors import ProcessFailed

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

LIVE = ("RUNNING", "PENDING", "CANCELLING")


@contextmanager
def connect(api: str) -> "Iterator[SyncPrefectClient]":
    """A client of the server at ``api``; the user's own credentials are not sent to it.

    Raises:
        ProcessFailed: the server does not answer.
    """
    import ssl

    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY, PREFECT_API_URL, temporary_settings

    # Plain HTTP to the loopback address: no proxies from the environment, no certificates to load.
    alone = {"trust_env": False, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
    try:
        with (
            temporary_settings({PREFECT_API_URL: api}, restore_defaults={PREFECT_API_KEY, PREFECT_API_AUTH_STRING}),
            get_client(httpx_settings=alone, sync_client=True) as client,
        ):
            yield client
    except httpx.TransportError as error:
        raise ProcessFailed(
            f"the Prefect server at {api} does not answer: {error or type(error).__name__}",
            fix="see `eagle3 status` and its log; `eagle3 down`, then `eagle3 up` starts it again",
        ) from error
    except httpx.HTTPStatusError as error:
        if error.response.status_code < 500:
            raise
        raise ProcessFailed(
            f"the Prefect server at {api} failed: {error.response.status_code} {error.response.reason_phrase}",
            fix="try again (its database can be locked on a very busy machine); its log is in the state folder",
        ) from error


def healthy(api: str) -> bool:
    """Whether a Prefect server answers at ``api``."""
    try:
        return bool(_get(f"{api}/health") is True)
    except (OSError, HTTPException, ValueError):
        return False


def server_version(api: str) -> str:
    """Prefect's version as the server at ``api`` says it."""
    return str(_get(f"{api}/admin/version"))


def _get(url: str) -> Any:
    with build_opener(ProxyHandler({})).open(url, timeout=5) as response:
        return json.load(response)


def runs(
    client: "SyncPrefectClient", types: Sequence[str], names: Sequence[str] | None = None, pool: str | None = None
) -> "list[FlowRun]":
    """Flow runs whose state has one of these types (and one of these names), of one work pool or of anybody."""
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateName,
        FlowRunFilterStateType,
        WorkPoolFilter,
        WorkPoolFilterName,
    )
    from prefect.client.schemas.objects import StateType

    state = FlowRunFilterState(
        type=FlowRunFilterStateType(any_=[StateType(item) for item in types]),
        name=FlowRunFilterStateName(any_=list(names)) if names else None,
    )
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=state),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])) if pool else None,
        limit=200,
    )
