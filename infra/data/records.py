"""Records of prompt files: reading them one by one, and turning each layout into a Prompt."""

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal

import fsspec
import pyarrow.parquet

from infra.data.prompt import Message, Prompt, content_id
from infra.errors import ConfigError

Answers = Literal["target", "given"]
LAYOUTS = ("messages", "conversations", "turns", "prompt", "instruction")
SHAREGPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
BATCH_ROWS = 1024


def read_records(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a JSONL (.gz too) or Parquet file, each with its place (``file:line``); never all in memory.

    Args:
        source: a path or an fsspec URL.

    Raises:
        ConfigError: the file is missing, of another kind, damaged, or a line is not a JSON object.
    """
    if source.endswith(JSONL):
        lines = _jsonl(source)
    elif source.endswith(".parquet"):
        lines = _parquet(source)
    else:
        raise ConfigError(
            f"prompts.source {source!r} has no known ending", expected=f"one of {(*JSONL, '.parquet')} or builtin:train"
        )
    place = source
    try:
        for place, record in lines:
            yield place, record
    except FileNotFoundError as error:
        raise ConfigError(
            f"prompts.source {source!r} does not exist", fix="correct the path in the round file"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # each protocol and format has a library with errors of its own
        raise ConfigError(
            f"{source} cannot be read after {place}: {error}", expected="a whole, undamaged file"
        ) from error


def to_prompt(record: Mapping[str, Any], place: str, answers: Answers) -> Prompt:
    """The prompt in a record.

    With ``answers="target"`` the record's own answers are left out and its later user turns become ``turns``; with
    ``"given"`` the conversation stays whole.

    Raises:
        ConfigError: unknown layout, unknown role, roles out of order, empty content, or no answer where one must be
            given.
    """
    layout = next((name for name in LAYOUTS if record.get(name) is not None), None)
    if layout is None:
        raise ConfigError(f"{place} has none of the fields {LAYOUTS}", expected="one of them in every record")
    messages = _messages(layout, record, place)
    _check(messages, place)
    if answers == "given":
        if messages[-1]["role"] != "assistant":
            raise ConfigError(
                f"{place} does not end with an answer", expected="whole conversations, as generate.answers is `given`"
            )
        opening, turns = messages, []
    else:
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        opening, turns = messages[: users[0] + 1], [messages[index]["content"] for index in users[1:]]
    own = record.get("id")
    if own is not None and (isinstance(own, bool) or not isinstance(own, str | int) or str(own).strip() == ""):
        raise ConfigError(f"{place} has the id {own!r}", expected="a non-empty string, a whole number or no id")
    _check_unicode(str(own), place)
    meta = {
        name: value
        for name, value in record.items()
        if name not in (*LAYOUTS, "id") and isinstance(value, str | int | float | bool)
    }
    return Prompt(id=content_id(opening, turns) if own is None else str(own), messages=opening, turns=turns, meta=meta)


def _jsonl(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with fsspec.open(source, "rb", compression="infer") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            place = f"{source}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{place} is not JSON: {error}", fix="correct or remove the line") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{place} holds a {type(record).__name__}", expected="a JSON object on every line")
            yield place, record


def _parquet(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    with fsspec.open(source, "rb") as stream, pyarrow.parquet.ParquetFile(stream) as table:
        for batch in table.iter_batches(batch_size=BATCH_ROWS):
            for record in batch.to_pylist():
                number += 1
                yield f"{source}:{number}", record


def _messages(layout: str, record: Mapping[str, Any], place: str) -> list[Message]:
    value = record[layout]
    if layout in ("prompt", "instruction"):
        text = _text(value, place)
        extra = record.get("input") if layout == "instruction" else None
        return [{"role": "user", "content": f"{text}\n\n{_text(extra, place)}" if extra else text}]
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{place} has {layout} = {value!r:.60}", expected="a non-empty list")
    if layout == "turns":
        return [{"role": "user", "content": _text(turn, place)} for turn in value]
    return [_message(item, layout, place) for item in value]


def _message(item: Any, layout: str, place: str) -> Message:
    if not isinstance(item, dict):
        raise ConfigError(
            f"{place} has a message that is a {type(item).__name__}", expected="an object with role and content"
        )
    if layout == "conversations":
        role = SHAREGPT.get(str(item.get("from")))
        if role is None:
            raise ConfigError(f"{place} has a message from {item.get('from')!r}", expected=f"one of {sorted(SHAREGPT)}")
        return {"role": role, "content": _text(item.get("value"), place)}
    if item.get("role") not in ("system", "user", "assistant"):
        raise ConfigError(f"{place} has the role {item.get('role')!r}", expected="system, user or assistant")
    more = sorted(name for name in ("tool_calls", "reasoning_content") if item.get(name))
    if more:
        raise ConfigError(f"{place} has messages with {more}", expected="answers that are plain text in `content`")
    return {"role": item["role"], "content": _text(item.get("content"), place)}


def _text(value: Any, place: str) -> str:
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        value = "".join(str(part.get("text", "")) for part in value)
    if not isinstance(value, str):
        raise ConfigError(f"{place} has content that is a {type(value).__name__}", expected="text")
    if not value.strip():
        raise ConfigError(f"{place} has empty content", expected="text in every message")
    _check_unicode(value, place)
    return value


def _check_unicode(text: str, place: str) -> None:
    """JSON can spell half a surrogate pair, which is no character: neither tokenizers nor stores take it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place} has text that is not Unicode: {text[error.start]!r} at character {error.start}",
            expected="whole characters (an emoji is two \\u escapes, one after the other)",
            fix="correct or remove the record",
        ) from error


def _check(messages: list[Message], place: str) -> None:
    """Roles: one system message at most, at the front; then the user; never two answers in a row."""
    roles = [message["role"] for message in messages]
    spoken = roles[1:] if roles[0] == "system" else roles
    answers_in_a_row = any(pair == ("assistant", "assistant") for pair in pairwise(spoken))
    if not spoken or spoken[0] != "user" or "system" in spoken or answers_in_a_row:
        raise ConfigError(
            f"{place} has the roles {roles}", expected="an optional system message, then user and assistant in turn"
        )
