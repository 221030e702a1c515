"""What the target's next turn sees of the answers before it.

A serving user sends the parsed parts of an answer back (its content, its reasoning where the template has a field for
it), and the template makes the history of them: it keeps the thinking or leaves it out. Here it is the same, and one
rule says what is let through. In the next turn's prompt, as token ids, an answer stands either

* whole: the target's own tokens, right behind the generation prompt, as they were generated, or
* without its thinking: the target's own last tokens, surrounded by what the template writes around any answer. What
  is left out ends with the template's mark of the end of thinking and is all of one piece: either the template, given
  thinking and content as the last message, writes the answer's tokens again; or the mark comes once in it, and the
  thinking was opened by the generation prompt or at the answer's beginning; or the answer begins the assistant's
  message anew, just as the template does (the channels of gpt-oss).

Blanks at the answer's ends may be missing, and the tokens that end the turn are the template's. An answer for which
no parsing fulfils this ends its conversation, with a reason of :data:`ENDINGS`; so does an answer that was cut.
The marks are learnt from the template itself: those that it writes between thinking and content or before a content,
and those in its source at which it parts a content.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.data.places import PRIVATE, find_place
from infra.data.prompt import Message
from infra.data.template import CLOSING_MARK, REASONING_FIELDS, Chat, opening_mark
from infra.errors import ConfigError
from infra.store.answers import Answer

CUT = "an earlier answer was cut"
UNPARTED = "an earlier answer cannot be shown again"
OTHER_HISTORY = "the prompt shows earlier answers otherwise than the target wrote them"
ENDINGS = (CUT, UNPARTED)
"""Why a conversation ends before its last turn although the target answered."""

CONTENT, THOUGHT, QUESTION = (chr(letter) for letter in PRIVATE[-3:])
LONGEST_END = 32
"""Tokens that end a turn, at most."""


@dataclass(frozen=True)
class _Shape:
    """What the template writes around an answer, whatever the answer.

    Attributes:
        opening: behind the question, up to where the target goes on (the generation prompt).
        header: behind ``opening``, before a content that is not the last; empty if there is nothing.
        held: the end of ``opening`` that does not stand before a content that is not the last.
        rest: behind a content that is not the last.
        thoughts: by field: what comes between ``opening`` and a thought, the end of ``opening`` that comes behind a
            (then empty) thought, and what stands between thought and content.
        marks: marks of the end of thinking.
    """

    opening: str
    header: str
    held: str
    rest: str
    thoughts: dict[str, tuple[str, str, str]]
    marks: list[str]


@dataclass(frozen=True)
class _Turn:
    """An answer in its prompt: messages before it, prompt and answer as token ids, the answer (``body``) also as text.

    What ends the turn is not part of ``body``.
    """

    before: list[Message]
    shape: _Shape
    prompt_ids: list[int]
    body: str
    body_ids: list[int]


class History:
    """The rule of this module for one target and one choice of template arguments."""

    def __init__(self, chat: Chat, template_args: Mapping[str, Any] | None = None) -> None:
        self._chat = chat
        self._args = dict(template_args or {})
        self._shapes: dict[tuple[str, ...], _Shape] = {}

    def after(
        self, messages: Sequence[Message], answers: Sequence[Answer], questions: Sequence[str]
    ) -> list[Message] | str:
        """The conversation that follows ``messages``: each answer as the template is given it, and the next question.

        Returns:
            The messages, or the reason (of :data:`ENDINGS`) why the conversation ends at one of the answers.

        Raises:
            ConfigError: the template refuses the conversation.
        """
        result = list(messages)
        turns: list[tuple[int, _Turn]] = []
        for answer, question in zip(answers, questions, strict=True):
            if answer.finish_reason == "length":
                return CUT
            follow: Message = {"role": "user", "content": question}
            turn = self._turn(result, answer)
            said = self._parsed(turn, follow)
            if said is None:
                return UNPARTED
            turns.append((len(result), turn))
            result += [said, follow]
        if not all(self._shows(result, place, turn) for place, turn in turns[:-1]):
            return UNPARTED
        return result

    def fault(self, answer: Answer, earlier: Sequence[Answer]) -> str | None:
        """Why a stored answer cannot be trained on: its prompt is not what the earlier answers make of it.

        Args:
            answer: a turn after the first.
            earlier: the answers to the turns before it, in order.
        """
        said = [place for place, message in enumerate(answer.messages) if message["role"] == "assistant"]
        if len(said) < len(earlier):
            return OTHER_HISTORY
        said = said[-len(earlier) :]
        first = answer.messages[: said[0]]
        questions = [answer.messages[place + 1]["content"] for place in said]
        made = self.after(first, earlier, questions)
        if isinstance(made, str):
            return made
        return None if self._same(answer.prompt_ids, made) else OTHER_HISTORY

    def _turn(self, before: Sequence[Message], answer: Answer) -> _Turn:
        shape = self._shape(before)
        prompt_ids = self._chat.render(before, self._args)
        body_ids = self._without_end(answer.answer_ids, shape.rest)
        # Some tokenizers drop a blank at a text's beginning, so the answer is read behind its prompt.
        body = self._chat.decode(prompt_ids + body_ids)[len(self._chat.decode(prompt_ids)) :]
        return _Turn(list(before), shape, prompt_ids, body, body_ids)

    def _shape(self, before: Sequence[Message]) -> _Shape:
        """Learnt once for each order of roles."""
        roles = tuple(message["role"] for message in before)
        if roles not in self._shapes:
            self._shapes[roles] = self._learnt(before)
        return self._shapes[roles]

    def _learnt(self, before: Sequence[Message]) -> _Shape:
        asked = find_place(before, len(before) - 1, self._chat, self._args, add_generation_prompt=True)
        follow = {"role": "user", "content": QUESTION}
        head, _, rest = self._chat.text([*before, _said(CONTENT), follow], self._args).partition(CONTENT)
        header, held = _beyond(head, asked.text)
        thoughts = {}
        for field in REASONING_FIELDS:
            if parts := self._around_thought(before, field):
                thoughts[field] = (*_beyond(parts[0], asked.text), parts[1])
        written = "".join([header, *(between for _, _, between in thoughts.values())])
        marks = CLOSING_MARK.findall(written)
        marks += [
            mark for mark in set(CLOSING_MARK.findall(self._chat.template)) if self._parts_at(mark, before, follow)
        ]
        return _Shape(asked.text[asked.end :], header, held, rest, thoughts, sorted(set(marks)))

    def _around_thought(self, before: Sequence[Message], field: str) -> tuple[str, str] | None:
        """What the template writes before the thinking of a last message, and between thinking and content."""
        message = {**_said(CONTENT), field: THOUGHT}
        try:
            text = self._chat.text([*before, message], self._args, add_generation_prompt=False)
        except ConfigError:
            return None
        head, thought, rest = text.partition(THOUGHT)
        between, content, _ = rest.partition(CONTENT)
        return (head, between) if thought and content and between else None

    def _parts_at(self, mark: str, before: Sequence[Message], follow: Message) -> bool:
        """Whether the template leaves out what a content has up to a mark."""
        said = _said(opening_mark(mark) + THOUGHT + mark + CONTENT)
        try:
            text = self._chat.text([*before, said, follow], self._args)
        except ConfigError:
            return False
        return THOUGHT not in text and CONTENT in text

    def _without_end(self, ids: Sequence[int], rest: str) -> list[int]:
        """An answer without the tokens that end a turn; ``rest`` is what the template writes behind a content."""
        bare = list(ids[:-1] if ids and ids[-1] in self._chat.eos_ids else ids)
        for found in (list(ids), bare):
            for length in range(min(LONGEST_END, len(found)), 0, -1):
                end = found[len(found) - length :]
                ends = end[-1] in self._chat.eos_ids or not self._chat.decode(end, special=False).strip()
                if ends and rest.startswith(self._chat.decode(end)):
                    return found[: len(found) - length]
        return bare

    def _parsed(self, turn: _Turn, follow: Message) -> Message | None:
        """The answer as a message that fulfils the rule, or None."""
        closing = self._closing(turn.shape.rest)
        if closing and turn.body.rstrip().endswith(closing):
            return None  # they share a token with the answer, and would be there twice
        for said in self._candidates(turn):
            try:
                if self._shows([*turn.before, said, follow], len(turn.before), turn):
                    return said
            except ConfigError:  # some templates refuse marks of thinking in a content
                continue
        return None

    def _closing(self, rest: str) -> str:
        """The words that the template writes behind an answer, before the token that ends the turn."""
        words = rest.partition(QUESTION)[0]
        return min((words.partition(token)[0] for token in self._chat.special_tokens), key=len, default=words).strip()

    def _candidates(self, turn: _Turn) -> Iterator[Message]:
        """Ways to part the answer; each is to be proven."""
        shape, body = turn.shape, turn.body
        yield _said(shape.held + body)
        for field, (opened, given, between) in shape.thoughts.items():
            thought, found, content = (given + body.removeprefix(opened)).partition(between)
            if found:
                yield {**_said(content), field: thought}
        for mark in shape.marks:
            thought, found, content = body.partition(mark)
            yield _said(content if found else thought)
            yield _said(content.lstrip("\n"))
        if shape.header:
            yield _said(body.removeprefix(shape.header))
            yield _said(body.rpartition(shape.opening + shape.header)[2])

    def _shows(self, messages: list[Message], index: int, turn: _Turn) -> bool:
        """Whether the rule holds for the answer at ``index`` in the prompt that ``messages`` make."""
        place = find_place(messages, index, self._chat, self._args, add_generation_prompt=True)
        ids = self._chat.render(messages, self._args)
        end = self._chat.border(place.text, place.end, ids)
        if end is None or ids != self._chat.encode(place.text):
            return False
        whole = ids[:end]
        for body_ids, body in self._trimmed(turn):
            if whole[-len(body_ids) :] == body_ids and place.text[: place.end].endswith(turn.shape.opening + body):
                return True
        start = self._chat.border(place.text, place.start, ids)
        if start is None or place.shown.strip() != messages[index]["content"].strip():
            return False
        shown = whole[start:]
        ends = [body for body_ids, body in self._trimmed(turn) if body_ids[-len(shown) :] == shown]
        if not ends or not ends[0].endswith(place.shown):
            return False
        left_out = ends[0].removesuffix(place.shown)
        if self._keeps_thought(messages, index, turn):
            return False  # it should have been shown whole
        return self._is_thought(turn, messages[index], left_out, place.text[: place.start])

    def _trimmed(self, turn: _Turn) -> Iterator[tuple[list[int], str]]:
        """The answer, with ever fewer blank tokens at its end."""
        ids, body = turn.body_ids, turn.body
        while ids and body.strip():
            yield ids, body
            last = self._chat.decode(ids[-1:])
            if last.strip() or not last or not body.endswith(last):
                return
            ids, body = ids[:-1], body.removesuffix(last)

    def _keeps_thought(self, messages: list[Message], index: int, turn: _Turn) -> bool:
        """Whether the prompt would show the thinking of this message, were it in a field of its own."""
        other = list(messages)
        other[index] = {**messages[index], **dict.fromkeys(turn.shape.thoughts, THOUGHT)}
        return bool(turn.shape.thoughts) and THOUGHT in self._chat.text(other, self._args)

    def _is_thought(self, turn: _Turn, said: Message, left_out: str, before: str) -> bool:
        """Whether what the history leaves out of an answer is thinking, and all of it."""
        if not left_out.strip() and before.endswith(turn.shape.opening):
            return True  # nothing but blanks
        if any(field in said for field in REASONING_FIELDS):
            last = self._chat.render([*turn.before, said], self._args, add_generation_prompt=False)
            return any(
                last[: len(turn.prompt_ids) + len(ids)] == turn.prompt_ids + ids for ids, _ in self._trimmed(turn)
            )
        shape = turn.shape
        if shape.header and left_out.endswith(shape.opening + shape.header):
            return left_out.count(shape.header) == 1
        return any(_closed_once(shape.opening, left_out, mark) for mark in shape.marks)

    def _same(self, stored: Sequence[int], messages: list[Message]) -> bool:
        """Whether a stored prompt is that of ``messages``, but for what stands before the first question (a date)."""
        ids = self._chat.render(messages, self._args)
        first = next(place for place, message in enumerate(messages) if message["role"] == "user")
        place = find_place(messages, first, self._chat, self._args, add_generation_prompt=True)
        start = self._chat.border(place.text, place.start, ids)
        if start is None:
            return list(stored) == ids
        rest = ids[start:]
        return list(stored[-len(rest) :]) == rest


def _said(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _beyond(head: str, prompt: str) -> tuple[str, str]:
    """What a text has beyond a prompt that it continues, and what the prompt has beyond it."""
    return (
        head.removeprefix(prompt) if head.startswith(prompt) else "",
        prompt.removeprefix(head) if prompt.startswith(head) else "",
    )


def _closed_once(opening: str, left_out: str, mark: str) -> bool:
    """Whether thinking begins with the generation prompt or the answer, and ends once, with what is left out."""
    text, opener = opening + left_out, opening_mark(mark)
    opened = opener in opening or left_out.lstrip().startswith(opener)
    return opened and text.count(mark) == 1 and text.rstrip().endswith(mark) and text.index(opener) < text.index(mark)
