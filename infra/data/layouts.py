"""From a record, in whichever of the usual layouts, to a Prompt."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from infra.data.prompt import Prompt, content_id
from infra.data.tally import Unusable
from infra.data.turns import RawMessage, asked_of, whole
from infra.data.values import carried, decoded, filled, own_id, read_text

Answers = Literal["target", "given"]

LAYOUTS = (
    "messages", "conversations", "turns", "prompt", "instruction", "conversation", "dialog", "dialogue", "contents",
    "chat", "question", "query", "problem", "input", "inputs", "chosen", "data", "text",
)  # fmt: skip
"""Fields that hold a conversation or a question, in any case; the first that can be one counts."""

TALKS = (
    "messages", "conversations", "turns", "conversation", "dialog", "dialogue", "contents", "chat", "chosen", "data",
    "text",
)  # fmt: skip
TEXTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("turns", "prompt"), ("user",)),
    **dict.fromkeys(("data", "dialog", "dialogue"), ("user", "assistant")),
}
"""Who says what in a list of plain texts, in turn."""
ENVELOPES = ("row", "body", "request", "input", "conversation")
"""Fields in which some logs and exports hold the whole record."""
ANSWERS = (
    "chosen", "completion", "response", "output", "solution", "generated_solution", "answer", "targets", "target",
    "preferred_output",
)  # fmt: skip
"""A whole solution goes before its result, which data sets of problems have as `answer`."""
FURTHER = {
    **dict.fromkeys(("instruction", "question", "query"), ("input", "context")),
    **dict.fromkeys(("input", "problem"), ("context",)),
}
"""What a question is about, in fields of their own, by the field of the question."""
PAIRS = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("question", "answer"))
"""Fields of a question with its answer, as one object of a list."""
SYSTEMS = ("system", "system_prompt")
"""A system message in a field of its own."""
SPEAKERS = ("role", "from", "speaker")
CONTENTS = ("content", "value", "text", "parts", "utterance")
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "ai", "model", "bot", "claude",
                     "chatbot"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_call", "function_response", "tool_call", "tool_response",
                     "observation", "ipython"), "tool"),
}  # fmt: skip
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
CONTEXT = {
    "tools": "its tools", "functions": "its tools", "history": "its history", "documents": "its documents",
    "choices": "its choices", "options": "its choices", "other_replies": "its other replies",
}  # fmt: skip
SWITCHES = ("on", "off")
"""What data sets have in a field named as reasoning is, that says whether there is any."""
TRANSCRIPTS = (
    re.compile(r"(?:\A|\n\n)(?P<role>Human|Assistant):"),
    re.compile(r"### ?(?P<role>Human|Assistant):"),
)
"""Before each message of a conversation that is one text (HH-RLHF, Guanaco)."""
REASONING = ("reasoning_content", "reasoning", "thinking")


def to_prompt(record: Any, answers: Answers) -> tuple[Prompt, list[str]]:
    """The prompt in a record, and what the record carries besides that is not used.

    With ``answers="target"`` the record's own answers are left out, whatever they are, and its later user turns become
    ``turns``; what follows a tool's call or a system message in the middle is not used. With ``"given"`` the
    conversation stays whole.

    Raises:
        Unusable: unknown layout or role, messages in an order that cannot be put to the target, content that is empty
            or not text, or no answer where one must be given.
    """
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, Mapping):
        raise Unusable("is not a JSON object", type(record).__name__)
    record = _opened(record)
    if any(filled(record.get(name)) for name in MEDIA):
        raise Unusable("has images, video or sound")
    without = [what for name, what in CONTEXT.items() if carried(record.get(name))]
    turns = _turns(record, answers, without)
    opening, later = (whole(turns), []) if answers == "given" else asked_of(turns, without)
    if any(turn.named for turn in turns):
        without.append("names of speakers")
    meta = {
        name: value
        for name, value in record.items()
        if name != "id" and str(name).lower() not in LAYOUTS and isinstance(value, str | int | float | bool)
    }
    own = own_id(record.get("id"))
    prompt = Prompt(content_id(opening, later) if own is None else own, opening, later, meta)
    return prompt, list(dict.fromkeys(without))


def _opened(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record with its fields' names in lower case too, and without an envelope around it."""
    record = {**{str(name).lower(): value for name, value in record.items()}, **record}
    for name in ENVELOPES:
        inner = record.get(name)
        if isinstance(inner, Mapping) and any(filled(inner.get(layout)) for layout in LAYOUTS):
            return {**{key: value for key, value in record.items() if key != name}, **inner}
    return record


def _turns(record: Mapping[str, Any], answers: Answers, without: list[str]) -> list[RawMessage]:
    """All messages of a record, without empty system messages."""
    layout = _layout(record)
    turns = _said(layout, record[layout], record, without)
    if answers == "given" and (layout not in TALKS or any(turn.role == "user" for turn in turns[-1:])):
        reasoning = (record.get(name) for name in REASONING)
        if layout not in TALKS and any(filled(said) and said not in SWITCHES for said in reasoning):
            raise Unusable("has reasoning in a field of its own")
        if record.get("label") is False:
            raise Unusable("has answers that are not to be trained on")
        turns = _answered(turns, record, {*ANSWERS} - {layout})
    turns = [turn for turn in turns if turn.role != "system" or filled(turn.content)]
    said = (record.get(name) for name in SYSTEMS)
    system = next((text for text in said if isinstance(text, str | bytes | list) and filled(text)), None)
    if system is not None and all(turn.role != "system" for turn in turns):
        turns.insert(0, RawMessage("system", system))
    return turns


def _layout(record: Mapping[str, Any]) -> str:
    """The field that holds the conversation or the question."""
    filled_ones = [name for name in LAYOUTS if filled(record.get(name)) and _is_layout(name, record[name])]
    layout = next((name for name in filled_ones if name not in TALKS or _may_be_talk(record[name])), None)
    layout = layout or next(iter(filled_ones), None)
    if layout is not None:
        return layout
    empty = next((name for name in LAYOUTS if name in record and not filled(record[name])), None)
    if empty is not None:
        raise Unusable(f"has an empty `{empty}`")
    raise Unusable(
        f"has none of the fields {', '.join(LAYOUTS)}",
        f"it has {', '.join(dict.fromkeys(str(name).lower() for name in record))}"[:120],
    )


def _is_layout(name: str, value: Any) -> bool:
    """Whether a field may be what its name says; `data` and `text` are names of all kinds of things."""
    if name == "data":
        return _are_texts(value) or _are_messages(value)
    return name != "text" or bool(_transcript(value))


def _said(layout: str, value: Any, record: Mapping[str, Any], without: list[str]) -> list[RawMessage]:
    value = decoded(value)
    if spoken := _transcript(value):
        return spoken
    if isinstance(value, str):
        value = _parsed(layout, value)
    if isinstance(value, Mapping):
        value = _by_row(layout, value)
    if isinstance(value, list):
        if layout in TEXTS and _are_texts(value):
            if any(isinstance(record.get(name), list) and _are_texts(record[name]) for name in ANSWERS):
                raise Unusable(f"has many answers beside a list of texts in `{layout}`")
            roles = TEXTS[layout]
            return [RawMessage(roles[place % len(roles)], item) for place, item in enumerate(value)]
        if layout in TALKS and (pair := _pair(value)):
            return [
                turn
                for item in value
                for turn in (RawMessage("user", item[pair[0]]), RawMessage("assistant", item[pair[1]]))
            ]
        if layout in TALKS or any(isinstance(item, Mapping) and _role(item) is not None for item in value):
            return [_turn(item, layout) for item in value]
    if layout in TALKS:
        raise Unusable(f"has `{layout}` that is no list of messages", type(value).__name__)
    return [RawMessage("user", _question(layout, value, record, without))]


def _question(layout: str, value: Any, record: Mapping[str, Any], without: list[str]) -> Any:
    """A question with what it is about, each from its field."""
    about = [name for name in FURTHER.get(layout, ()) if filled(record.get(name))]
    texts = [record[name] for name in about if name != "context" or isinstance(record[name], str | bytes)]
    if filled(record.get("context")) and record["context"] not in texts:
        without.append("its context")
    return "\n\n".join(read_text(part, "a question") for part in (value, *texts)) if texts else value


def _transcript(value: Any) -> list[RawMessage]:
    """The messages of a conversation that is one text; none where it is not one."""
    value = value.strip() if isinstance(value, str) else ""
    for marks in TRANSCRIPTS:
        before, *rest = marks.split(value)
        said = [RawMessage(ROLES[role.lower()], text.strip()) for role, text in zip(rest[::2], rest[1::2], strict=True)]
        if not before and len({turn.role for turn in said}) == 2:
            return said if said[-1].content else said[:-1]
    return []


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(decoded(item), str) or item is None for item in value)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) and _role(item) is not None for item in value)


def _may_be_talk(value: Any) -> bool:
    """Whether a value may be a list of messages; a number may count them, and a text name them."""
    value = decoded(value)
    return isinstance(value, list | Mapping) or (
        isinstance(value, str) and (value.lstrip().startswith(("[", "{")) or bool(_transcript(value)))
    )


def _pair(items: list[Any]) -> tuple[str, str] | None:
    """The fields by which each of some objects holds a question and its answer; None where they are messages."""
    found = (pair for pair in PAIRS if all(isinstance(item, Mapping) and {*pair} <= item.keys() for item in items))
    return next(found, None) if all(isinstance(item, Mapping) and _role(item) is None for item in items) else None


def _answered(turns: list[RawMessage], record: Mapping[str, Any], names: Collection[str]) -> list[RawMessage]:
    """A conversation with its last answer, which lies in a field of its own."""
    name = next((name for name in ANSWERS if name in names and filled(record.get(name))), None)
    if name is None:
        return turns
    value = decoded(record[name])
    if spoken := _transcript(value):
        return spoken
    if isinstance(value, str):
        return [*turns, RawMessage("assistant", value)]
    if isinstance(value, Mapping):
        value = [value] if _are_messages([value]) else _by_row(name, value)
    if not isinstance(value, list):
        raise Unusable("has an answer that is not text", type(value).__name__)
    said = [_turn(item, name) for item in value]
    return said if any(turn.role == "user" for turn in said) else [*turns, *said]


def _parsed(layout: str, text: str) -> Any:
    """Messages that are stored as JSON text; a question stays the text that it is."""
    if layout not in TALKS and not text.lstrip().startswith("["):
        return text
    try:
        value = json.loads(text)
        return value if layout in TALKS or _are_messages(value) else text
    except (ValueError, RecursionError) as error:
        if layout not in TALKS:
            return text
        raise Unusable(f"has `{layout}` that is text but not JSON", f"{text[:30]!r}") from error


def _by_row(layout: str, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A list of messages that is stored as one list for each field."""
    values = list(columns.values())
    if not values or not all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        raise Unusable(f"has `{layout}` that is no list of messages", "object")
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _role(item: Mapping[str, Any]) -> Any:
    return decoded(next((item[name] for name in SPEAKERS if item.get(name)), None))


def _turn(item: Any, layout: str) -> RawMessage:
    if not isinstance(item, Mapping):
        raise Unusable(f"has `{layout}` with messages that are no objects", type(item).__name__)
    said = _role(item)
    if said is None and layout == "turns":
        said = "user"
    role = ROLES.get(said.strip().lower()) if isinstance(said, str) else None
    if role is None:
        raise Unusable("has a message of a role that is not known", f"{said!r:.40}")
    content = next((item[name] for name in CONTENTS if item.get(name) is not None), None)
    return RawMessage(
        role=role,
        content=content,
        named=role in ("system", "user") and filled(item.get("name")),
        calls=any(carried(item.get(name)) for name in ("tool_calls", "function_call")),
        reasoning=any(filled(item.get(name)) for name in REASONING),
        untrained=item.get("weight") in (0, "0") or item.get("train") is False,
    )
