"""The names of samples."""

from typing import NamedTuple, Self


class SampleId(NamedTuple):
    """What a sample answers: ``PROMPT#TURN``, and ``PROMPT#TURN.ANSWER`` for further answers to the same prompt.

    Attributes:
        prompt: id of the prompt, which may have any signs.
        turn: assistant turn of the conversation, from 0.
        answer: which of the answers to the prompt, from 0; each has a conversation of its own.
    """

    prompt: str
    turn: int = 0
    answer: int = 0

    def __str__(self) -> str:
        return f"{self.prompt}#{self.turn}" + (f".{self.answer}" if self.answer else "")

    @classmethod
    def read(cls, text: str) -> Self:
        """The parts of a name; one that has no ``#`` is a prompt's."""
        prompt, mark, rest = text.rpartition("#")
        if not mark:
            return cls(text)
        turn, _, answer = rest.partition(".")
        return cls(prompt, int(turn), int(answer or 0))

    def at(self, turn: int) -> str:
        """Name of another turn of the same conversation."""
        return str(self._replace(turn=turn))
