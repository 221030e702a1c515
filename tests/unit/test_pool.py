"""The bounded pool: everything once, nothing piles up, closing stops it."""

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest

from infra.engines.client.pool import run_ordered, run_pool


def test_every_item_comes_back_once_with_its_result_or_its_exception() -> None:
    def work(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number * number

    results = dict(run_pool(range(20), work, concurrency=4))
    fault = results.pop(3)
    assert isinstance(fault, ValueError)
    assert results == {number: number * number for number in range(20) if number != 3}


def test_results_come_as_they_finish() -> None:
    first_may_end = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert first_may_end.wait(10)
        return number

    order = []
    for number, _ in run_pool(range(3), work, concurrency=2):
        order.append(number)
        first_may_end.set() if number == 2 else None
    assert order == [1, 2, 0]


def test_no_more_items_are_taken_than_the_window_holds() -> None:
    taken = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    pool = run_pool(items(), lambda number: number, concurrency=2, window=5)
    for count, _ in enumerate(pool, start=1):
        assert len(taken) <= count + 5 - 1
        if count == 10:
            break
    pool.close()
    assert len(taken) < 20


def test_concurrency_is_reached_and_not_exceeded() -> None:
    together = threading.Barrier(3, timeout=10)
    running, most, lock = 0, 0, threading.Lock()

    def work(number: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1

    outcomes = [outcome for _, outcome in run_pool(range(6), work, concurrency=3)]
    assert outcomes == [None] * 6
    assert most == 3


def test_closing_starts_nothing_more_and_its_threads_end() -> None:
    before = set(threading.enumerate())
    release = threading.Event()
    started = []

    def work(number: int) -> None:
        started.append(number)
        if number > 0:
            assert release.wait(10)

    pool = run_pool(range(50), work, concurrency=2)
    assert next(pool) == (0, None)
    pool.close()
    release.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
    assert len(started) <= 3


def test_what_is_not_an_exception_ends_the_whole() -> None:
    def work(number: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_pool(range(3), work, concurrency=1))


@pytest.mark.parametrize("wait", [
    lambda work: next(run_ordered([0], work, 1, 1)),
    lambda work: next(run_pool([0], work, 1)),
])  # fmt: skip
def test_an_exception_that_is_thrown_in_ends_a_wait(wait: Callable[[Callable[[int], None]], object]) -> None:
    """As Prefect ends a flow that has lost its slot: the exception comes through only between two steps of Python."""
    going_on, began, ended = threading.Event(), threading.Event(), threading.Event()

    def work(_item: int) -> None:
        began.set()
        going_on.wait()

    def flow() -> None:
        try:
            wait(work)
        except ThrownIn:
            ended.set()

    thread = threading.Thread(target=flow, daemon=True)
    thread.start()
    assert began.wait(30)
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(ThrownIn))
    assert ended.wait(30)
    going_on.set()


class ThrownIn(BaseException):
    pass
