"""What can go wrong between a client and an engine's server, as errors of this project."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from infra.engines.client.dialect import RequestRefused
from infra.errors import EngineError


class EngineSilent(EngineError):
    """The server has not answered a request within its time limit."""


class Unreachable(EngineError):
    """A failure of the connection, worth another try where a second one does no harm."""


def status_error(path: str, status: int, body: str) -> EngineError:
    """What an answer with another status than 200 means: 4xx refuses this one request."""
    message = f"{path} answered {status}: {_message(body)}"
    return RequestRefused(message) if 400 <= status < 500 else EngineError(message)


@contextmanager
def understood(path: str) -> Iterator[None]:
    """Around reading an answer: one of another shape than the engine's is the server's fault, not this program's."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineError(
            f"{path} answered in a shape that is not the engine's: {type(error).__name__}: {error}",
            fix="see that nothing else answers on the engine's port, and that its version is one that is known",
        ) from error


def _message(text: str) -> str:
    try:
        body = json.loads(text)
        return str(body["error"]["message"] if "error" in body else body.get("message", body))[:400]
    except (ValueError, LookupError, TypeError, AttributeError):
        return text[:400]
