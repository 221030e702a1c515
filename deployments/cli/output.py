"""What commands print: progress on stderr with the time so far, facts on stdout as a table or as JSON."""

import json
import logging
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

facts_printed = False
"""Whether this command has printed its facts as JSON."""


def say(text: str) -> None:
    """One line of progress on stderr, with the seconds since the command began."""
    print(f"[{time.monotonic() - _BEGIN:7.1f} s] {text}", file=sys.stderr, flush=True)


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
