"""Hears what a logger logs, where pytest's ``caplog`` is not to be had: in fixtures of a module, and as it happens."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Ear(logging.Handler):
    def __init__(self, hear: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(record)


@contextmanager
def hearing(name: str, hear: Callable[[logging.LogRecord], object]) -> Iterator[None]:
    """Call ``hear`` with each record of a logger and of those below it, from INFO on."""
    log, ear = logging.getLogger(name), _Ear(hear)
    before = log.level
    log.setLevel(logging.INFO)
    log.addHandler(ear)
    try:
        yield
    finally:
        log.removeHandler(ear)
        log.setLevel(before)
