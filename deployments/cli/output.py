"""What commands print: progress on stderr with the time so far, facts on stdout as a table or as JSON."""

import json
import logging
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print facts as JSON on standard output.")]
_BEGIN = time.monotonic()
SHOW_SECONDS = 30.0
"""Pause between two lines of :func:`show` where the output is not a terminal."""
_ERASE = "\r\x1b[K"

facts_printed = False
"""Whether this command has printed its facts as JSON."""
_shown_at = float("-inf")
_in_place = False
"""Whether the cursor stands behind a line of :func:`show`."""


def say(text: str) -> None:
    """One line of progress on stderr, with the seconds since the command began; takes the place of what is shown."""
    global _in_place
    print((_ERASE if _in_place else "") + _line(text), file=sys.stderr, flush=True)
    _in_place = False


def show(text: str) -> None:
    """How far something is: a line that the next one replaces; where that cannot be, a line now and then."""
    global _in_place, _shown_at
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        print(_ERASE + _line(text)[: width - 1], end="", file=sys.stderr, flush=True)
        _in_place = True
    elif time.monotonic() - _shown_at >= SHOW_SECONDS:
        _shown_at = time.monotonic()
        say(text)


def _line(text: str) -> str:
    return f"[{time.monotonic() - _BEGIN:7.1f} s] {text}"


class _Said(logging.Handler):
    """Says each record's message."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextmanager
def log_said() -> Iterator[None]:
    """Meanwhile what ``infra`` and ``deployments`` log is said, and by nobody else: Prefect prints its root's log."""
    handler, loggers = _Said(), [logging.getLogger(name) for name in ("infra", "deployments")]
    before = [(log.level, log.propagate) for log in loggers]
    for log in loggers:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    try:
        yield
    finally:
        for log, (level, propagates) in zip(loggers, before, strict=True):
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagates


def print_json(facts: Any) -> None:
    """Facts for a machine, on stdout; once a command, so that they are one JSON document."""
    global facts_printed
    print(json.dumps(facts, indent=2, default=str))
    facts_printed = True


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Facts for a person, on stdout; nothing is cut off when the output is not a terminal."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    console().print(table)


def console() -> Console:
    """Rich console on stdout."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)
