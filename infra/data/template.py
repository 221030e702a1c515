"""The target's tokenizer and chat template, and how templates mark thinking."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from infra.config.json_file import read_json
from infra.data.prompt import Message
from infra.errors import ConfigError
from infra.targets.target import Target
from infra.targets.tokenizer import give_template, open_tokenizer

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names by which templates take an answer's thinking apart from its content."""
CLOSING_MARK = re.compile(r"[<\[◁]\|?/[^\s<>\[\]'\"]+[>\]▷]|<\w+\|>|<\|(?:END|end)_\w+\|>")
"""What may end thinking: `</think>`, `[/THINK]`, `<channel|>`, `<|END_THINKING|>` and their like."""
CONTEXT_TOKENS = 8
"""Tokens before a border that are read with it, for decoders that treat a text's beginning otherwise."""
CHARACTER_BYTES = 4
"""Bytes of a character, each of which may be a token of its own and is then shown as a letter."""


class Chat:
    """Renders conversations as the target's own chat template does, from the files in its folder.

    Args:
        target: the target; its folder holds the tokenizer, nothing is fetched.

    Raises:
        ConfigError: the tokenizer cannot be loaded or has no chat template.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._tokenizer: Any = open_tokenizer(target.path, target.name, target.trust_remote_code)
        give_template(self._tokenizer, target.path, target.name)

    def render(
        self,
        messages: Sequence[Message],
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation; the generation prompt opens the assistant's next turn.

        Raises:
            ConfigError: the template refuses the conversation.
        """
        return [int(token) for token in self._apply(messages, template_args, add_generation_prompt, tokenize=True)]

    def text(
        self,
        messages: Sequence[Message],
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """What :meth:`render` tokenises.

        Raises:
            ConfigError: the template refuses the conversation.
        """
        return str(self._apply(messages, template_args, add_generation_prompt, tokenize=False))

    def encode(self, text: str) -> list[int]:
        """Token ids of text in which special tokens are written out, as the template writes them; nothing is added."""
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decode(self, ids: Sequence[int], special: bool = True) -> str:
        """Text of token ids; ``special=False`` leaves out special tokens (as in the text of an answer)."""
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    def border(self, text: str, place: int, ids: Sequence[int]) -> int | None:
        """How many of ``ids``, the tokens of ``text``, make ``text[:place]``; None where a token spans that border.

        A text's beginning alone may have other tokens at its end than it has as a part of the whole (GPT-2 takes the
        last of several blanks to the word that follows); what counts is whether the whole's tokens end there.
        """
        alone, whole = self.encode(text[:place]), list(ids)
        shorter = min(len(alone), len(whole))
        shared = next((count for count in range(shorter) if alone[count] != whole[count]), shorter)
        near = max(0, shared - CONTEXT_TOKENS)
        wanted = self.decode(alone[near:])
        for count in range(shared, len(whole) + 1):
            made = self.decode(whole[near:count])
            if made == wanted:
                return count
            if len(made) > len(wanted) + CHARACTER_BYTES:
                return None
        return None

    @property
    def template(self) -> str:
        """Source of the chat template; empty if the tokenizer renders by code of its own."""
        return str(self._tokenizer.chat_template or "")

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer: those of generation_config.json and the tokenizer's own.

        Raises:
            ConfigError: generation_config.json is damaged.
        """
        found = {self._tokenizer.eos_token_id}
        path = self.target.path / "generation_config.json"
        if path.is_file():
            value = read_json(path).get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            if not all(token is None or isinstance(token, int) for token in values):
                raise ConfigError(f"{path} has eos_token_id = {value!r:.60}", expected="token ids")
            found |= set(values)
        return tuple(sorted(token for token in found if token is not None))

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens as text, longest first."""
        added = self._tokenizer.added_tokens_decoder
        texts = {token.content for token in added.values() if token.special} | {
            self.decode([token]) for token in self.eos_ids
        }
        return tuple(sorted(texts, key=lambda text: (-len(text), text)))

    def _apply(
        self, messages: Sequence[Message], template_args: Mapping[str, Any] | None, prompt: bool, *, tokenize: bool
    ) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=tokenize,
                add_generation_prompt=prompt,
                return_dict=False,
                **dict(template_args or {}),
            )
        except Exception as error:  # a template computes, and what it calls has errors of its own
            raise ConfigError(
                f"the chat template of target {self.target.name} refuses a conversation of the roles "
                f"{[message['role'] for message in messages]} with arguments {dict(template_args or {})}: "
                f"{str(error) or type(error).__name__}",
                fix="change prompts.system, prompts.template_args or the conversations",
            ) from error


def opening_mark(closing: str) -> str:
    """The mark that goes before a mark of :data:`CLOSING_MARK`."""
    if "/" in closing:
        return closing.replace("/", "", 1)
    if closing.startswith("<|"):
        return closing.replace("END_", "START_", 1).replace("end_", "begin_", 1)
    return f"<|{closing[1:-2]}>"
