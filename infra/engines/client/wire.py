"""HTTP to one server of this machine, over connections that are kept; safe to use from any number of threads.

The standard library's client: with 64 requests in flight httpx takes four times its processor time for each, since its
pool looks through all connections at every request.
"""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import urlsplit

CONNECT_SECONDS = 10.0
TROUBLE = (HTTPException, OSError)
"""What :meth:`Wire.exchange` raises when the connection fails; silence is a TimeoutError, which is an OSError."""


class Unconnected(OSError):
    """No connection came about."""


class Wire:
    """Requests to one server; no proxy of the environment is used.

    Args:
        base_url: e.g. ``http://127.0.0.1:8000``.
        timeout: longest silence of the server within a request, seconds.
    """

    def __init__(self, base_url: str, timeout: float) -> None:
        where = urlsplit(base_url)
        self._host, self._port, self._timeout = where.hostname or "", where.port, timeout
        self._idle: list[HTTPConnection] = []
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def closed(self) -> threading.Event:
        """Set by :meth:`close`."""
        return self._closed

    @contextmanager
    def exchange(self, method: str, path: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
        """The reply to one request, to be read within the block.

        Raises:
            Unconnected: no connection came about.
            TimeoutError: the server was silent for too long.
            HTTPException, OSError: the connection broke.
        """
        connection = self._take()
        try:
            headers = {"Accept": "*/*"} | ({"Content-Type": "application/json"} if body is not None else {})
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            yield reply
        except BaseException:
            connection.close()
            raise
        if reply.isclosed() and connection.sock is not None:
            with self._lock:
                self._idle.append(connection)
        else:  # not read to its end, or the server wants no more
            reply.close()
            connection.close()

    def close(self) -> None:
        """Give up: requests in flight fail at once, in whatever thread they wait."""
        self._closed.set()
        with self._lock:
            for opened in self._sockets:
                with suppress(OSError):  # it was closed already
                    opened.shutdown(socket.SHUT_RDWR)
            for connection in self._idle:
                connection.close()
            self._idle = []

    def _take(self) -> HTTPConnection:
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            if kept is None:
                return self._connect()
            if not _hung_up(kept):
                return kept
            kept.close()

    def _connect(self) -> HTTPConnection:
        connection = HTTPConnection(self._host, self._port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise Unconnected(error.strerror or str(error)) from error
        opened: socket.socket = connection.sock
        opened.settimeout(self._timeout)
        with self._lock:
            self._sockets = {known for known in self._sockets if known.fileno() >= 0} | {opened}
        if self._closed.is_set():
            opened.shutdown(socket.SHUT_RDWR)
        return connection


def _hung_up(connection: HTTPConnection) -> bool:
    """Whether the server ended a connection that nobody waits on: there is something to read, its end."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))
