"""Notices: what happened and was dealt with, in the log and as Prefect events that an automation can act on."""

from prefect import get_run_logger
from prefect.events import emit_event

from infra.engines.server.notice import Notice


def announce(notice: Notice) -> None:
    """Log a server's notice and emit the event ``eagle3.server.<what>``, e.g. ``eagle3.server.hang``.

    The event's resource is the server (``eagle3.server.vllm-extract``); the flow run and its task are related to it.
    """
    get_run_logger().warning(notice.text)
    emit_event(
        f"eagle3.server.{notice.what}",
        resource={"prefect.resource.id": f"eagle3.server.{notice.purpose}", "prefect.resource.name": notice.purpose},
        payload={"text": notice.text},
    )
