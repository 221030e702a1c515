"""From a record's messages, in whatever order, to what can be put to the target."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from infra.data.prompt import Message
from infra.data.tally import Unusable
from infra.data.values import read_text


@dataclass(frozen=True)
class RawMessage:
    """A message as the record has it: ``content`` may be anything."""

    role: str
    content: Any
    named: bool = False
    calls: bool = False
    reasoning: bool = False
    untrained: bool = False

    def text(self) -> str:
        """The content; raises :class:`Unusable` where that is no text."""
        return read_text(
            self.content, {"user": "a question", "assistant": "an answer"}.get(self.role, "a system message")
        )

    def message(self) -> Message:
        """The message as templates take it."""
        return {"role": self.role, "content": self.text()}


def asked_of(turns: Sequence[RawMessage], without: list[str]) -> tuple[list[Message], list[str]]:
    """(system message and first question, later questions); answers are not looked at.

    Args:
        turns: all messages.
        without: told what is not used.

    Raises:
        Unusable: there is no question, or something else before it.
    """
    opening: list[Message] = []
    asked: list[str] = []
    for turn in turns:
        if turn.role == "user":
            asked.append(turn.text())
        elif turn.role == "assistant" and not asked:
            raise Unusable("begins with an answer")
        elif turn.role == "tool" or turn.calls:
            if not asked:
                raise Unusable("begins with a tool")
            without.append("what follows a call of a tool")
            break
        elif turn.role == "system":
            if asked:
                without.append("what follows a system message in the middle")
                break
            if opening:
                raise Unusable("has two system messages")
            opening.append(turn.message())
    if not asked:
        raise Unusable("has no question")
    return [*opening, {"role": "user", "content": asked[0]}], asked[1:]


def whole(turns: Sequence[RawMessage]) -> list[Message]:
    """The whole conversation: an optional system message, the user, and never two answers in a row.

    Raises:
        Unusable: it is in another order, or has what cannot be trained on.
    """
    roles = [turn.role for turn in turns]
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    if "tool" in roles or any(turn.calls for turn in turns):
        raise Unusable("has calls of tools")
    if "user" not in spoken:
        raise Unusable("has no question")
    if "system" in spoken:
        raise Unusable("has two system messages" if spoken[0] == "system" else "has a system message in the middle")
    if spoken[0] == "assistant":
        raise Unusable("begins with an answer")
    if ("assistant", "assistant") in pairwise(spoken):
        raise Unusable("has two answers in a row")
    if spoken[-1] != "assistant":
        raise Unusable("does not end with an answer" if "assistant" in spoken else "has no answer")
    if any(turn.reasoning for turn in turns):
        raise Unusable("has reasoning in a field of its own")
    if any(turn.untrained for turn in turns if turn.role == "assistant"):
        raise Unusable("has answers that are not to be trained on")
    return [turn.message() for turn in turns]
