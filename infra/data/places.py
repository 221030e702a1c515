"""Where a message's text stands in a rendered conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.data.prompt import Message
from infra.data.template import Chat

PRIVATE = range(0xFF000, 0xFFFFE)
"""The end of a private use plane of Unicode: letters that neither templates nor (as logos, icons) people write."""


@dataclass(frozen=True)
class TextSpan:
    """``text[start:end]`` is what a template shows of one message; all around it stays when its content is another.

    Attributes:
        text: the rendered conversation.
        start: first character of the message's text.
        end: the character behind it.
    """

    text: str
    start: int
    end: int

    @property
    def shown(self) -> str:
        """The message's text as the template writes it."""
        return self.text[self.start : self.end]


def find_place(
    messages: Sequence[Message],
    index: int,
    chat: Chat,
    template_args: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = False,
) -> TextSpan:
    """The place of ``messages[index]``, found by rendering the conversation with another content there.

    Raises:
        ConfigError: the template refuses the conversation.
    """
    text = chat.text(messages, template_args, add_generation_prompt)
    probed = list(messages)
    probed[index] = {**messages[index], "content": letter_not_in(text)}
    other = chat.text(probed, template_args, add_generation_prompt)
    start = _shared(text, other)
    tail = min(_shared(text[::-1], other[::-1]), len(text) - start)
    return TextSpan(text, start, len(text) - tail)


def hides_a_question(
    messages: Sequence[Message],
    chat: Chat,
    template_args: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = False,
) -> bool:
    """Whether a template renders the same whatever one of the questions says.

    Raises:
        ConfigError: the template refuses the conversation.
    """
    text = chat.text(messages, template_args, add_generation_prompt)
    for index, message in enumerate(messages):
        if message["role"] != "user" or message["content"].strip() in text:
            continue
        other = [*messages[:index], {**message, "content": letter_not_in(text)}, *messages[index + 1 :]]
        if chat.text(other, template_args, add_generation_prompt) == text:
            return True
    return False


def letter_not_in(text: str) -> str:
    """A letter that a text does not have, so that its place in another rendering is sure."""
    return next(letter for letter in map(chr, PRIVATE) if letter not in text)


def _shared(one: str, other: str) -> int:
    """How many characters two texts share at their beginning."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)
