"""Which tokens of a given conversation the assistant wrote.

The template is rendered with and without a turn, and with another answer in its place. The turn's tokens are named only
where all of it agrees; otherwise the turn is refused with a reason, because a wrong mask is worse than a sample less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra.data.prompt import Message, Prompt
from infra.data.template import Chat
from infra.store.answers import Answer

Refusal = Literal["empty", "special", "rewritten", "boundary", "tokenizer"]
REFUSALS: Mapping[str, str] = {
    "empty": "the answer is blank",
    "special": "the answer's text spells out a special token",
    "rewritten": "the template changes the answer's text (takes thinking out, say)",
    "boundary": "a token spans the border between the answer and what surrounds it",
    "tokenizer": "rendering to token ids and tokenising the rendered text differ",
}
# A generation prompt holds the beginning of an answer only as a short marker.
OVERLAP_CHARACTERS = 64


@dataclass(frozen=True)
class Turn:
    """One assistant turn in tokens.

    Attributes:
        prompt_ids: everything before what the assistant wrote.
        answer_ids: what the assistant wrote, with its end-of-turn token if the template writes one.
    """

    prompt_ids: list[int]
    answer_ids: list[int]


def given_answers(prompt: Prompt, chat: Chat, template_args: Mapping[str, Any] | None = None) -> list[Answer]:
    """One Answer for each assistant turn of ``prompt.messages``.

    A turn that cannot be used has the status ``empty`` or ``dropped``, and the reason (a key of :data:`REFUSALS`) as
    its ``finish_reason``; the others are ``ok`` and ``given``. The sample id is ``<prompt id>#<turn>``.

    Raises:
        ConfigError: the template refuses the conversation.
    """
    places = [index for index, message in enumerate(prompt.messages) if message["role"] == "assistant"]
    answers = []
    for number, place in enumerate(places):
        messages = list(prompt.messages[: place + 1])
        turn = locate(messages, chat, template_args)
        reason = "given" if isinstance(turn, Turn) else turn
        ids = turn if isinstance(turn, Turn) else Turn([], [])
        answers.append(
            Answer(
                sample_id=f"{prompt.id}#{number}",
                messages=messages,
                prompt_ids=ids.prompt_ids,
                answer_ids=ids.answer_ids,
                finish_reason=reason,
                engine="given",
                sampling={},
                status="ok" if reason == "given" else "empty" if reason == "empty" else "dropped",
                turn=number,
            )
        )
    return answers


def locate(messages: Sequence[Message], chat: Chat, template_args: Mapping[str, Any] | None = None) -> Turn | Refusal:
    """The tokens of the last message, an assistant turn, or why they cannot be told.

    Raises:
        ConfigError: the template refuses the conversation.
    """
    before, content = list(messages[:-1]), messages[-1]["content"]
    if not content.strip():
        return "empty"
    if any(token in content for token in chat.special_tokens):
        return "special"
    full = chat.text(messages, template_args, add_generation_prompt=False)
    span = _span(
        full=full,
        prompt=chat.text(before, template_args, add_generation_prompt=True),
        content=content,
        probe=chat.text(
            [*before, {"role": "assistant", "content": _probe(content)}], template_args, add_generation_prompt=False
        ),
        special=chat.special_tokens,
    )
    if span is None:
        return "rewritten"
    start, end = span
    ids, head, whole = chat.encode(full), chat.encode(full[:start]), chat.encode(full[:end])
    if ids != chat.render(messages, template_args, add_generation_prompt=False):
        return "tokenizer"
    if not head or len(head) >= len(whole) or ids[: len(head)] != head or ids[: len(whole)] != whole:
        return "boundary"
    return Turn(head, whole[len(head) :])


def _span(full: str, prompt: str, content: str, probe: str, special: Sequence[str]) -> tuple[int, int] | None:
    """Where in ``full`` the assistant's turn starts and ends (characters)."""
    found = _after_prompt(full, prompt, content) or _by_probe(full, probe, content)
    if found is None:
        return None
    start, end = found
    if not probe.endswith(full[end:]):
        return None
    return start, end + _end_token(full[end:], special)


def _after_prompt(full: str, prompt: str, content: str) -> tuple[int, int] | None:
    """The turn where it follows the generation prompt, as it does in serving."""
    if not full.startswith(prompt):
        return None
    rest = full[len(prompt) :]
    gap = len(rest) - len(rest.lstrip())
    for text in (content, content.rstrip()):
        if rest.startswith(text):
            return len(prompt), len(prompt) + len(text)
    for text in (content.lstrip(), content.strip()):
        if rest[gap:].startswith(text):
            return len(prompt), len(prompt) + gap + len(text)
    # A generation prompt may already hold the answer's beginning, `<think>` say.
    for text in (content, content.rstrip(), content.lstrip(), content.strip()):
        for shared in range(min(len(text) - 1, len(prompt), OVERLAP_CHARACTERS), 0, -1):
            if prompt.endswith(text[:shared]) and rest.startswith(text[shared:]):
                return len(prompt), len(prompt) + len(text) - shared
    return None


def _by_probe(full: str, probe: str, content: str) -> tuple[int, int] | None:
    """The turn where renderings of two different answers differ."""
    start = _shared(full, probe)
    tail = min(_shared(full[::-1], probe[::-1]), len(full) - start)
    end = len(full) - tail
    inner = full[start:end]
    return (start, end) if inner == content.strip() else None


def _shared(one: str, other: str) -> int:
    """How many characters two texts share at their beginning."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def _probe(content: str) -> str:
    """An answer whose first and last letters differ from the content's."""
    text = content.strip()
    first = "Q" if text[0] != "Q" else "Z"
    last = "Q" if text[-1] != "Q" else "Z"
    return f"{first} other {last}"


def _end_token(tail: str, special: Sequence[str]) -> int:
    """Characters up to and with the special token that ends the turn; 0 if the template writes none."""
    gap = len(tail) - len(tail.lstrip())
    for token in special:
        if tail.startswith(token, gap):
            return gap + len(token)
    return 0
