"""Work on many items by threads, a bounded number at a time."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


WAKE_SECONDS = 0.5
"""Whoever waits looks up this often: an exception that another thread throws in (Prefect, when a run loses its slot)
comes through only between two steps of Python, not in the middle of a wait."""


class _End:
    """Tells a thread to end."""


def run_pool(
    items: Iterable[T], work: Callable[[T], R], concurrency: int, window: int | None = None
) -> Generator[tuple[T, R | Exception], None, None]:
    """Each item with what ``work`` gave for it, or the exception it raised, in the order in which they finish.

    Items are taken from ``items`` as room appears, so neither they nor the results pile up. When the iterator is closed
    no further item is started; a thread that is inside ``work`` ends with that call, and as a daemon it keeps no
    program from ending. (Close the client it waits on to end it at once.)

    Args:
        items: what to work on; read in the caller's thread.
        work: called in the pool's threads.
        concurrency: number of threads.
        window: most items taken and not yet handed back; by default twice ``concurrency``.
    """
    room = max(window or 2 * concurrency, concurrency)
    todo: SimpleQueue[T | _End] = SimpleQueue()
    done: SimpleQueue[tuple[T, R | BaseException]] = SimpleQueue()
    stopping = threading.Event()

    def loop() -> None:
        while not isinstance(item := todo.get(), _End) and not stopping.is_set():
            try:
                outcome: R | BaseException = work(item)
            except BaseException as error:  # handed to the caller, who raises what is not an Exception
                outcome = error
            done.put((item, outcome))

    for number in range(concurrency):
        threading.Thread(target=loop, name=f"pool-{number}", daemon=True).start()
    source = iter(items)
    try:
        yield from _results(source, todo, done, room)
    finally:
        stopping.set()
        for _ in range(concurrency):
            todo.put(_End())


def _results(
    source: Iterator[T], todo: "SimpleQueue[T | _End]", done: "SimpleQueue[tuple[T, R | BaseException]]", room: int
) -> Generator[tuple[T, R | Exception], None, None]:
    pending, more = 0, True
    while more or pending:
        while more and pending < room:
            try:
                todo.put(next(source))
                pending += 1
            except StopIteration:
                more = False
        if pending:
            item, outcome = _next(done)
            pending -= 1
            if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
                raise outcome
            yield item, outcome


def _next(done: "SimpleQueue[tuple[T, R | BaseException]]") -> tuple[T, R | BaseException]:
    while True:
        with suppress(Empty):
            return done.get(timeout=WAKE_SECONDS)


def _result(future: "Future[R]") -> R:
    while not wait([future], WAKE_SECONDS).done:
        pass
    return future.result()


class Room:
    """So many bytes, or whatever else is counted, for threads to share.

    Args:
        most: what may be held at once; one holder alone may have more.
    """

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Hold so much of it; waits until there is room."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size <= self._most)
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()


def run_ordered(
    items: Iterable[T], work: Callable[[T], R], concurrency: int, window: int
) -> Generator[tuple[T, R], None, None]:
    """Each item with what ``work`` gave for it, in the order of ``items``; an exception of ``work`` is raised here.

    At most ``window`` items are started and not yet handed back, finished ones included, so memory stays bounded also
    when one item takes long. When the iterator is closed no further item is started; what is inside ``work`` goes on,
    and the program does not end before it: unlike those of :func:`run_pool` these threads are no daemons.

    Args:
        items: what to work on; read in the caller's thread.
        work: called in ``concurrency`` threads.
        window: at least ``concurrency``.
    """
    executor = ThreadPoolExecutor(concurrency, thread_name_prefix="ordered")
    waiting: deque[tuple[T, Future[R]]] = deque()
    try:
        for item in items:
            waiting.append((item, executor.submit(work, item)))
            if len(waiting) >= max(window, concurrency):
                first, future = waiting.popleft()
                yield first, _result(future)
        while waiting:
            first, future = waiting.popleft()
            yield first, _result(future)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
