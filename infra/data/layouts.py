"""From a record, in whichever of the usual layouts, to a Prompt."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any, Literal
from uuid import UUID

from infra.data.prompt import Message, Prompt, content_id
from infra.data.tally import Unusable

Answers = Literal["target", "given"]

LAYOUTS = (
    "messages", "conversations", "turns", "prompt", "instruction", "conversation", "dialog", "dialogue",
    "question", "query", "problem", "input", "inputs", "chosen", "data",
)  # fmt: skip
"""Fields that hold a conversation or a question; the first that can be one counts."""

TALKS = ("messages", "conversations", "turns", "conversation", "dialog", "dialogue", "chosen", "data")
ANSWERS = ("chosen", "completion", "response", "output", "solution", "answer", "targets", "target")
"""A whole solution goes before its result, which data sets of problems have as `answer`."""
FURTHER = ("input", "context")
"""What a question in `instruction`, `question` or `query` is about."""
PAIRS = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("question", "answer"))
"""Fields of a question with its answer, as one object of a list."""
SYSTEMS = ("system", "system_prompt")
"""A system message in a field of its own."""
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "ai", "model", "bot", "claude"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_call", "function_response", "tool_call", "tool_response",
                     "observation", "ipython"), "tool"),
}  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
CONTEXT = {"tools": "its tools", "functions": "its tools", "history": "its history", "documents": "its documents"}
EMPTY_JSON = ("[]", "{}", "null")
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
    if any(_filled(record.get(name)) for name in MEDIA):
        raise Unusable("has images, video or sound")
    without = [what for name, what in CONTEXT.items() if _carried(record.get(name))]
    if _filled(record.get("context")) and not isinstance(record["context"], str | bytes):
        without.append("its context")
    turns = _turns(record, answers)
    opening, later = (_whole(turns), []) if answers == "given" else _asked(turns, without)
    if any(turn.named for turn in turns):
        without.append("names of speakers")
    meta = {
        name: value
        for name, value in record.items()
        if name not in (*LAYOUTS, "id") and isinstance(value, str | int | float | bool)
    }
    own = _own_id(record.get("id"))
    prompt = Prompt(content_id(opening, later) if own is None else own, opening, later, meta)
    return prompt, list(dict.fromkeys(without))


@dataclass(frozen=True)
class _RawMessage:
    """A message as the record has it: ``content`` may be anything."""

    role: str
    content: Any
    named: bool = False
    calls: bool = False
    reasoning: bool = False
    untrained: bool = False

    def text(self) -> str:
        return _text(self.content, {"user": "a question", "assistant": "an answer"}.get(self.role, "a system message"))

    def message(self) -> Message:
        return {"role": self.role, "content": self.text()}


def _turns(record: Mapping[str, Any], answers: Answers) -> list[_RawMessage]:
    """All messages of a record, without empty system messages."""
    filled = [name for name in LAYOUTS if _filled(record.get(name)) and (name != "data" or _are_texts(record[name]))]
    layout = next((name for name in filled if name not in TALKS or _may_be_talk(record[name])), None)
    layout = layout or next(iter(filled), None)
    if layout is None:
        empty = next((name for name in LAYOUTS if name in record and not _filled(record[name])), None)
        if empty is not None:
            raise Unusable(f"has an empty `{empty}`")
        raise Unusable(f"has none of the fields {', '.join(LAYOUTS)}", f"it has {', '.join(map(str, record))}"[:120])
    turns = _said(layout, record[layout], record)
    if answers == "given" and layout not in TALKS:
        if any(_filled(record.get(name)) for name in REASONING):
            raise Unusable("has reasoning in a field of its own")
        if record.get("label") is False:
            raise Unusable("has answers that are not to be trained on")
        turns = _answered(turns, record)
    turns = [turn for turn in turns if turn.role != "system" or _filled(turn.content)]
    said = (record.get(name) for name in SYSTEMS)
    system = next((text for text in said if isinstance(text, str | bytes | list) and _filled(text)), None)
    if system is not None and all(turn.role != "system" for turn in turns):
        turns.insert(0, _RawMessage("system", system))
    return turns


def _said(layout: str, value: Any, record: Mapping[str, Any]) -> list[_RawMessage]:
    value = _decoded(value)
    if layout in TALKS and isinstance(value, str):
        value = _parsed(layout, value)
    if isinstance(value, Mapping):
        value = _by_row(layout, value)
    if isinstance(value, list):
        if layout in ("turns", "data") and _are_texts(value):
            roles = ("user", "user" if layout == "turns" else "assistant")
            return [_RawMessage(roles[place % 2], item) for place, item in enumerate(value)]
        if layout in TALKS and (pair := _pair(value)):
            return [
                turn
                for item in value
                for turn in (_RawMessage("user", item[pair[0]]), _RawMessage("assistant", item[pair[1]]))
            ]
        if layout in TALKS or any(isinstance(item, Mapping) and _role(item) is not None for item in value):
            return [_turn(item, layout) for item in value]
    if layout in TALKS:
        raise Unusable(f"has `{layout}` that is no list of messages", type(value).__name__)
    about = FURTHER if layout in ("instruction", "question", "query") else ()
    extra = [record[name] for name in about if _filled(record.get(name))]
    extra = [part for part in extra if isinstance(part, str | bytes) or part is not record.get("context")]
    if not extra:
        return [_RawMessage("user", value)]
    return [_RawMessage("user", "\n\n".join(_text(part, "a question") for part in (value, *extra)))]


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(_decoded(item), str) or item is None for item in value)


def _may_be_talk(value: Any) -> bool:
    """Whether a value may be a list of messages; a number may count them, and a text name them."""
    value = _decoded(value)
    return isinstance(value, list | Mapping) or (isinstance(value, str) and value.lstrip().startswith(("[", "{")))


def _pair(items: list[Any]) -> tuple[str, str] | None:
    """The fields by which each of some objects holds a question and its answer; None where they are messages."""
    found = (pair for pair in PAIRS if all(isinstance(item, Mapping) and {*pair} <= item.keys() for item in items))
    return next(found, None) if all(isinstance(item, Mapping) and _role(item) is None for item in items) else None


def _answered(turns: list[_RawMessage], record: Mapping[str, Any]) -> list[_RawMessage]:
    """The question with the answer that lies in a field of its own."""
    name = next((name for name in ANSWERS if _filled(record.get(name))), None)
    if name is None:
        raise Unusable("has no answer")
    value = _decoded(record[name])
    if isinstance(value, str):
        return [*turns, _RawMessage("assistant", value)]
    if isinstance(value, Mapping):
        value = _by_row(name, value)
    if not isinstance(value, list):
        raise Unusable("has an answer that is not text", type(value).__name__)
    said = [_turn(item, name) for item in value]
    return said if any(turn.role == "user" for turn in said) else [*turns, *said]


def _parsed(layout: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"has `{layout}` that is text but not JSON", f"{text[:30]!r}") from error


def _by_row(layout: str, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A list of messages that is stored as one list for each field."""
    values = list(columns.values())
    if not values or not all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        raise Unusable(f"has `{layout}` that is no list of messages", "object")
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _role(item: Mapping[str, Any]) -> Any:
    return _decoded(item.get("role") or item.get("from"))


def _turn(item: Any, layout: str) -> _RawMessage:
    if not isinstance(item, Mapping):
        raise Unusable(f"has `{layout}` with messages that are no objects", type(item).__name__)
    said = _role(item)
    role = ROLES.get(said.strip().lower()) if isinstance(said, str) else None
    if role is None:
        raise Unusable("has a message of a role that is not known", f"{said!r:.40}")
    content = next((item[name] for name in ("content", "value", "text") if item.get(name) is not None), None)
    return _RawMessage(
        role=role,
        content=content,
        named=role in ("system", "user") and _filled(item.get("name")),
        calls=any(_carried(item.get(name)) for name in ("tool_calls", "function_call")),
        reasoning=any(_filled(item.get(name)) for name in REASONING),
        untrained=item.get("weight") in (0, "0") or item.get("train") is False,
    )


def _asked(turns: list[_RawMessage], without: list[str]) -> tuple[list[Message], list[str]]:
    """(system message and first question, later questions); answers are not looked at."""
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


def _whole(turns: list[_RawMessage]) -> list[Message]:
    """The whole conversation: an optional system message, the user, and never two answers in a row."""
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


def _text(value: Any, what: str) -> str:
    value = _decoded(value)
    if isinstance(value, list):
        kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in value]
        if any(kind not in TEXT_PARTS for kind in kinds):
            raise Unusable(f"has {what} with parts that are not text", ", ".join(sorted(set(map(str, kinds))))[:60])
        texts = [part.get("text") for part in value]
        if not all(isinstance(text, str | None) for text in texts):
            raise Unusable(f"has {what} with parts that are not text", "text in text")
        value = "".join(text or "" for text in texts)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise Unusable(f"has {what} that is blank")
    if not isinstance(value, str):
        raise Unusable(f"has {what} that is not text", type(value).__name__)
    _check_unicode(value)
    return value


def _check_unicode(text: str) -> None:
    """JSON can spell half a surrogate pair, which is no character: neither tokenizers nor stores take it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unusable(
            "has text that is not Unicode", f"{text[error.start]!r} at character {error.start}, half an emoji"
        ) from error


def _decoded(value: Any) -> Any:
    """Text that a Parquet file holds as bytes, as some writers do."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise Unusable("has bytes where text should be") from error


def _carried(value: Any) -> bool:
    """Whether a field that may be JSON as text says anything."""
    return _filled(value) and not (isinstance(value, str) and value.strip() in EMPTY_JSON)


def _filled(value: Any) -> bool:
    """Whether a field says anything; a table has an object of nothing but nulls where a record had none."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):
        return any(_filled(part) for part in value.values())
    if isinstance(value, list):
        return any(_filled(part) for part in value)
    return value is not None and value not in (b"", False)


def _own_id(value: Any) -> str | None:
    """A record's own id as text; None where it has none that could name it.

    A whole number counts as the same id however it is stored: tables turn whole numbers into floats where one is
    missing.
    """
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
        value = text if text.isprintable() and "\ufffd" not in text else value.hex()
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = int(value) if value.is_integer() else repr(value)
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal | UUID):
        return None
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return text if text.strip() else None
