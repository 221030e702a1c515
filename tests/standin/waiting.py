"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable
from typing import TypeVar

POLL_SECONDS = 0.02
SHARE = 0.2
"""Most of the time that may go into looking: what is waited for needs the processors more."""
LIMIT_SECONDS = 240.0
"""Much longer than anything here takes on a loaded machine."""

Value = TypeVar("Value")


def wait_for(
    condition: Callable[[], Value | None],
    what: str,
    limit: float = LIMIT_SECONDS,
    alive: Callable[[], bool] = lambda: True,
) -> Value:
    """The condition's value once it holds, within ``limit`` seconds.

    Args:
        what: what is waited for, for the failure.
        alive: whether it can still come to hold.
    """
    begun = look = time.monotonic()
    while not (value := condition()):
        assert alive() or condition(), f"what was to do it ended before: {what}"
        now = time.monotonic()
        assert now < begun + limit, f"not within {limit:.0f} s: {what}"
        time.sleep(max(POLL_SECONDS, (now - look) / SHARE))
        look = time.monotonic()
    return value


def more(count: Callable[[], int], by: int) -> Callable[[], bool]:
    """True once ``count`` has grown by ``by``."""
    first = count()
    return lambda: count() >= first + by
