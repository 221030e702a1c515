"""A prompt: what is put to the target."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A conversation to be answered.

    Attributes:
        id: unique in its source.
        messages: system and first user turn; whole conversations, answers and all, when the data is used as given.
        turns: the user's further turns, each put after the target has answered the one before.
        meta: the record's other plain fields (source, category ...).
    """

    id: str
    messages: list[Message]
    turns: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)


def content_id(messages: Sequence[Message], turns: Sequence[str] = ()) -> str:
    """16 hex digits of the SHA-256 of a conversation."""
    text = json.dumps([list(messages), list(turns)], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def next_prompt(prompt: Prompt, answers_so_far: Sequence[str]) -> list[Message]:
    """The messages of the turn after ``answers_so_far`` (none: the first turn).

    Raises:
        ValueError: every turn has its answer already.
    """
    if len(answers_so_far) > len(prompt.turns):
        raise ValueError(f"prompt {prompt.id} has {len(prompt.turns) + 1} turns and as many answers")
    messages = list(prompt.messages)
    for answer, turn in zip(answers_so_far, prompt.turns, strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return messages


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """16 hex digits that change with any prompt's id or content, not with their order."""
    lines = sorted(f"{prompt.id}\0{content_id(prompt.messages, prompt.turns)}" for prompt in prompts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
