"""The project's own prompts: templates and word lists of ``builtin.toml``, filled by a seed.

Everything is decided by SHA-256, so a seed gives the same prompts on every machine and Python version.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd, prod
from pathlib import Path
from typing import Literal

from infra.data.prompt import Prompt, content_id
from infra.errors import ConfigError

SOURCE = Path(__file__).with_name("builtin.toml")
SLOT = re.compile(r"\{([a-z]+)(\d?)\}")
Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Template:
    """One form of prompt.

    Attributes:
        kind: what sort of task it sets.
        turns: the user's turns, with slots.
        slots: the slots in order of appearance, each with its words.
    """

    kind: str
    turns: tuple[str, ...]
    slots: dict[str, tuple[str, ...]]

    @property
    def size(self) -> int:
        """How many ways there are to fill the slots, one by one."""
        return prod(len(words) for words in self.slots.values())

    @property
    def usable(self) -> int:
        """How many of them have different words in numbered slots."""
        return prod(len(words) - (slot[:-1] in self.slots) for slot, words in self.slots.items())

    def fill(self, number: int) -> tuple[str, ...] | None:
        """The turns of filling ``number`` (0 to size - 1), or None where two slots of a list get the same word."""
        chosen: dict[str, str] = {}
        for slot, words in self.slots.items():
            number, index = divmod(number, len(words))
            chosen[slot] = words[index]
        for slot, word in chosen.items():
            if chosen.get(slot[:-1]) == word:
                return None
        return tuple(SLOT.sub(lambda match: chosen[match[1] + match[2]], turn) for turn in self.turns)


def builtin(split: Split, count: int, seed: int = 0) -> list[Prompt]:
    """``count`` different prompts; a larger count begins with the prompts of a smaller one.

    Raises:
        ConfigError: the templates do not give so many.
    """
    available = sum(template.usable for template in templates(split))
    if count > available:
        raise ConfigError(
            f"builtin:{split} has {available} prompts, fewer than the {count} asked for",
            fix="lower prompts.count or bring prompts of your own",
        )
    prompts: list[Prompt] = []
    streams = [_fillings(template, seed) for template in sorted(templates(split), key=lambda t: _number(seed, t.turns))]
    while len(prompts) < count:
        # One prompt of each template in turn, so that the first few are as mixed as all of them.
        prompts += [prompt for stream in streams if (prompt := next(stream, None))]
    return prompts[:count]


@cache
def templates(split: Split) -> tuple[Template, ...]:
    """The templates of a split, in the order of the file."""
    source = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
    lists = {name: tuple(words) for name, words in source["words"].items()}
    lists |= {name: tuple(str(n) for n in range(low, high + 1)) for name, (low, high) in source["numbers"].items()}
    result = []
    for entry in source[split]:
        turns = (entry["text"], *entry.get("then", ()))
        slots = {match[1] + match[2]: lists[match[1]] for turn in turns for match in SLOT.finditer(turn)}
        result.append(Template(entry["kind"], turns, slots))
    return tuple(result)


def _fillings(template: Template, seed: int) -> Iterator[Prompt]:
    """Every filling once, in an order that the seed decides: a walk with a stride coprime to the number of fillings."""
    size = template.size
    start = _number(seed, "start", template.turns) % size
    stride = _number(seed, "stride", template.turns) % size or 1
    while gcd(stride, size) != 1:
        stride += 1
    for step in range(size):
        turns = template.fill((start + step * stride) % size)
        if turns is not None:
            messages = [{"role": "user", "content": turns[0]}]
            yield Prompt(
                id=f"builtin-{content_id(messages, turns[1:])}",
                messages=messages,
                turns=list(turns[1:]),
                meta={"kind": template.kind, "source": "builtin"},
            )


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")
