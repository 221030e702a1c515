"""Which tokens of a given conversation the assistant wrote.

The template is rendered with and without a turn, and with another answer in its place. The turn's tokens are named only
where all of it agrees; otherwise the turn is refused with a reason, because a wrong mask is worse than a sample less.

What counts as written: the answer's text as the template shows it (blanks at its ends may be gone), thinking that the
message carries apart, and the tokens that end the turn, also where the template has them only at the next turn's start
(GLM's `<|user|>`). What the template itself puts before an answer, an empty thinking part say, counts as prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra.data.places import TextSpan, find_place
from infra.data.prompt import Message, Prompt
from infra.data.template import CLOSING_MARK, REASONING_FIELDS, Chat, opening_mark
from infra.errors import ConfigError
from infra.store.answers import GIVEN, Answer
from infra.store.sample_ids import SampleId

Refusal = Literal["empty", "special", "rewritten", "boundary", "tokenizer"]
"""Why a turn's tokens cannot be told.

``empty``: the answer is blank. ``special``: its text spells out a special token. ``rewritten``: the template changes
more of it than blanks at its ends (takes thinking out, say). ``boundary``: a token spans the border between the answer
and what surrounds it. ``tokenizer``: rendering to token ids and tokenising the rendered text differ.
"""
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

    A turn that cannot be used has the status ``empty`` or ``dropped``, and the reason (a :data:`Refusal`) as
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
                sample_id=str(SampleId(prompt.id, number)),
                messages=messages,
                prompt_ids=ids.prompt_ids,
                answer_ids=ids.answer_ids,
                finish_reason=reason,
                engine=GIVEN,
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
    before, message = list(messages[:-1]), messages[-1]
    if not message["content"].strip():
        return "empty"
    if any(token in message["content"] for token in chat.special_tokens):
        return "special"
    found = _locate(before, message, chat, template_args)
    for parted in _parted(message) if found == "rewritten" else ():
        other = _locate(before, parted, chat, template_args, written=message["content"].strip())
        if isinstance(other, Turn):
            return other
    return found


def _locate(
    before: list[Message], message: Message, chat: Chat, template_args: Mapping[str, Any] | None, written: str = ""
) -> Turn | Refusal:
    """The tokens of a message behind others; ``written``: what its turn must end with, as text."""
    messages = [*before, message]
    place = find_place(messages, len(before), chat, template_args)
    full, end = place.text, place.end
    start = _start(place, chat.text(before, template_args), message)
    if start is None or not full[:end].endswith(written):
        return "rewritten"
    opening = _opening(before, chat, template_args)
    tail = _end_of_turn(full[end:], opening, chat) or _end_at_next_turn(messages, chat, template_args)
    ids = chat.encode(full)
    if ids != chat.render(messages, template_args, add_generation_prompt=False):
        return "tokenizer"
    text, whole = full, ids
    if not full.startswith(tail, end):
        text = full[:end] + tail
        whole = chat.encode(text)
        said = chat.border(full, end, ids)
        if said is None or whole[:said] != ids[:said]:
            return "boundary"
    first, last = chat.border(text, start, whole), chat.border(text, end + len(tail), whole)
    if not first or last is None or first >= last:
        return "boundary"
    return Turn(whole[:first], whole[first:last])


def _parted(message: Message) -> Iterator[Message]:
    """A message whose text begins with thinking, with that in a field of its own."""
    content = message["content"].strip()
    for mark in CLOSING_MARK.findall(content)[:1]:
        thought, _, rest = content.partition(mark)
        if thought.startswith(opening_mark(mark)):
            thought = thought.removeprefix(opening_mark(mark)).strip()
            yield from ({**message, "content": rest.strip(), field: thought} for field in REASONING_FIELDS)


def _start(place: TextSpan, prompt: str, message: Message) -> int | None:
    """Where the last message begins, or None if the template rewrites it."""
    full, content = place.text, message["content"]
    thought = next((message[field] for field in REASONING_FIELDS if message.get(field)), None)
    if thought is not None:
        shown = full.startswith(prompt) and str(thought).strip() in full[len(prompt) : place.start]
        return len(prompt) if shown and place.shown.strip() == content.strip() else None
    found = _after_prompt(full, prompt, content)
    if found is not None and found[1] == place.end:
        return found[0]
    put_in = CLOSING_MARK.findall(full[len(prompt) : place.start]) if full.startswith(prompt) else []
    if any(content.lstrip().startswith(opening_mark(mark)) for mark in put_in):
        return None  # the template's empty thinking before the answer's own
    return place.start if place.shown.strip() == content.strip() else None


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


def _opening(before: list[Message], chat: Chat, template_args: Mapping[str, Any] | None) -> str:
    """The generation prompt, where the template adds it to what stands before."""
    prompt, bare = (chat.text(before, template_args, add) for add in (True, False))
    return prompt.removeprefix(bare) if prompt.startswith(bare) else ""


def _end_of_turn(tail: str, opening: str, chat: Chat) -> str:
    """The special tokens that end the turn, with blanks before them; empty if the template writes none.

    A token that opens a turn, as the generation prompt does, ends none unless the target says that it does.
    """
    ends = {chat.decode([token]) for token in chat.eos_ids}
    first, place = "", len(tail) - len(tail.lstrip())
    while token := next((token for token in chat.special_tokens if tail.startswith(token, place)), ""):
        place += len(token)
        if token in ends:
            return tail[:place]
        first = first or ("" if token in opening else tail[:place])
    return first


def _end_at_next_turn(messages: Sequence[Message], chat: Chat, template_args: Mapping[str, Any] | None) -> str:
    """What the template writes between an answer and the end token before the next question; empty if there is none.

    Words of the template's own are the target's to say, too: it was trained on turns that end with them.
    """
    follow: Message = {"role": "user", "content": "Go on."}
    try:
        place = find_place([*messages, follow], len(messages) - 1, chat, template_args)
    except ConfigError:
        return ""
    tail = place.text[place.end :].partition(follow["content"])[0]
    found = {tail.index(token): token for token in reversed(chat.special_tokens) if token in tail}
    first = min(found, default=0)
    ends = found and found[first] in {chat.decode([token]) for token in chat.eos_ids}
    return tail[: first + len(found[first])] if ends else ""
