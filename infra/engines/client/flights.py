"""Which requests one server has in flight, by the samples they are for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Flights:
    """Requests to one server, from its start to its end; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: set[str] = set()
        self._lost: set[str] = set()
        self._landed = 0

    @contextmanager
    def of(self, sample: str) -> Iterator[None]:
        """Around one sample's request: it has landed when the block ends, and is lost when an exception leaves it."""
        with self._lock:
            self._flying.add(sample)
        try:
            yield
        except BaseException:
            with self._lock:
                self._flying.discard(sample)
                self._lost.add(sample)
            raise
        with self._lock:
            self._flying.discard(sample)
            self._lost.discard(sample)
            self._landed += 1

    def around(self, send: Callable[[T], R]) -> Callable[[T], R]:
        """``send``, each call of it told; for requests that are for no sample."""
        numbers = count()

        def told(item: T) -> R:
            with self.of(f"request {next(numbers)}"):
                return send(item)

        return told

    @property
    def in_flight(self) -> int:
        """Requests that wait for an answer now."""
        with self._lock:
            return len(self._flying)

    @property
    def landed(self) -> int:
        """Requests that were answered."""
        with self._lock:
            return self._landed

    def lost(self) -> set[str]:
        """The samples whose requests failed or wait: when the server is dead, those that were in flight."""
        with self._lock:
            return self._lost | self._flying
