"""Choosing a round's prompts."""

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

from infra.config.round import PromptsConfig
from infra.data.builtin import builtin
from infra.data.prompt import Message, Prompt, content_id, next_prompt, prompts_digest
from infra.data.records import Answers, read_records, to_prompt
from infra.errors import ConfigError

__all__ = ["Message", "Prompt", "content_id", "load_prompts", "next_prompt", "prompts_digest"]

BUILTIN = "builtin:"


def load_prompts(config: PromptsConfig, answers: Answers = "target") -> list[Prompt]:
    """The prompts of a round: ``config.count`` of them, chosen and ordered by a hash of seed and id.

    The choice does not depend on the order of the file, and memory is bounded by ``count`` (times the number of
    strata). A record that comes twice counts once.

    Args:
        config: source, count, seed, strata, system prompt.
        answers: ``given`` keeps the conversations' own answers, ``target`` leaves them out.

    Raises:
        ConfigError: the source cannot be read, a record cannot be used (named by file and line), two different records
            share an id, or there are fewer prompts than asked for.
    """
    if config.source.startswith(BUILTIN):
        chosen = _builtin(config, answers)
    else:
        located = ((place, to_prompt(record, place, answers)) for place, record in read_records(config.source))
        chosen = _choose(located, config)
    return [_with_system(prompt, config.system) for prompt in chosen]


def _builtin(config: PromptsConfig, answers: Answers) -> list[Prompt]:
    split = config.source.removeprefix(BUILTIN)
    if split not in ("train", "heldout"):
        raise ConfigError(f"there is no prompts.source {config.source!r}", expected="builtin:train or builtin:heldout")
    if answers == "given":
        raise ConfigError(
            f"{config.source} has no answers", fix="set generate.answers to `target` or bring whole conversations"
        )
    if config.stratify:
        raise ConfigError(
            f"{config.source} cannot be stratified by {config.stratify!r}", fix="leave prompts.stratify empty"
        )
    return builtin("train" if split == "train" else "heldout", config.count, config.seed)


def _choose(located: Iterable[tuple[str, Prompt]], config: PromptsConfig) -> list[Prompt]:
    strata: dict[str, _Smallest] = {}
    for place, prompt in located:
        stratum = _stratum(prompt, config.stratify, place)
        strata.setdefault(stratum, _Smallest(config.count, config.seed)).offer(prompt, place)
    shares = _shares(config.count, sorted(strata))
    chosen: list[tuple[int, str, Prompt]] = []
    for name, kept in strata.items():
        of = f" with {config.stratify} = {name!r}" if config.stratify else ""
        if len(kept) < shares[name]:
            raise ConfigError(
                f"{config.source} has {len(kept)} different prompts{of}, fewer than the {shares[name]} asked for",
                fix="lower prompts.count or bring more prompts",
            )
        chosen += kept.first(shares[name])
    if not chosen:
        raise ConfigError(f"{config.source} has 0 prompts, fewer than the {config.count} asked for")
    chosen.sort(key=lambda item: item[:2])
    for (_, one, first), (_, other, second) in pairwise(chosen):
        if one == other:
            raise _conflict(config.source, first, second)
    return [prompt for _, _, prompt in chosen]


def _stratum(prompt: Prompt, field: str, place: str) -> str:
    if not field:
        return ""
    if field not in prompt.meta:
        raise ConfigError(
            f"{place} has no field {field!r} to stratify by", expected="it in every record, as prompts.stratify says"
        )
    return str(prompt.meta[field])


def _shares(count: int, names: list[str]) -> dict[str, int]:
    """Equal shares that sum to ``count``; the first names get the remainder."""
    each, more = divmod(count, len(names)) if names else (0, 0)
    return {name: each + (position < more) for position, name in enumerate(names)}


class _Smallest:
    """The ``limit`` prompts with the smallest hash of seed and id, of however many are offered."""

    def __init__(self, limit: int, seed: int) -> None:
        self._limit, self._seed = limit, seed
        self._heap: list[tuple[int, str]] = []
        self._prompts: dict[str, Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def offer(self, prompt: Prompt, place: str) -> None:
        known = self._prompts.get(prompt.id)
        if known is not None:
            if (known.messages, known.turns) != (prompt.messages, prompt.turns):
                raise _conflict(place, known, prompt)
            return
        # Negative, because the heap gives up its smallest entry and ours must give up its largest.
        entry = (-_rank(self._seed, prompt.id), prompt.id)
        self._prompts[prompt.id] = prompt
        if len(self._heap) < self._limit:
            heapq.heappush(self._heap, entry)
        else:
            _, dropped = heapq.heappushpop(self._heap, entry)
            del self._prompts[dropped]

    def first(self, count: int) -> Iterator[tuple[int, str, Prompt]]:
        for negative, name in sorted(self._heap, key=lambda item: (-item[0], item[1]))[:count]:
            yield -negative, name, self._prompts[name]


def _rank(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:16], "big")


def _conflict(place: str, one: Prompt, other: Prompt) -> ConfigError:
    def shown(prompt: Prompt) -> str:
        return prompt.messages[-1]["content"][:60]

    return ConfigError(
        f"{place}: the id {one.id!r} stands for two different prompts ({shown(one)!r} and {shown(other)!r})",
        expected="one content for each id",
        fix="give one of them another id",
    )


def _with_system(prompt: Prompt, system: str) -> Prompt:
    if not system or prompt.messages[0]["role"] == "system":
        return prompt
    return replace(prompt, messages=[{"role": "system", "content": system}, *prompt.messages])
