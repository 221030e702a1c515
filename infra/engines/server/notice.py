"""What a person should hear of a server while the round goes on by itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

What = Literal["hang", "rung", "remembered", "restart", "quarantine"]


@dataclass(frozen=True)
class Notice:
    """Something that happened to a server and was dealt with.

    Args:
        what: the kind: it hung; a rung failed and the next is tried; a rung that worked before comes first; the
            server was started anew in the middle of its work; a sample was left out.
        purpose: which server, e.g. ``vllm-extract``.
        text: one line for log, report and event.
    """

    what: What
    purpose: str
    text: str


OnNotice = Callable[[Notice], None]
