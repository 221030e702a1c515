"""Choosing a round's prompts."""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from infra.config.round import PromptsConfig
from infra.data.builtin import builtin
from infra.data.layouts import Answers, to_prompt
from infra.data.prompt import Message, Prompt, content_id, next_prompt, prompts_digest
from infra.data.records import read_records
from infra.data.tally import Tally, Unusable
from infra.data.trees import with_trees_as_conversations
from infra.errors import ConfigError

__all__ = ["Message", "Prompt", "content_id", "load_prompts", "next_prompt", "prompts_digest"]

BUILTIN = "builtin:"
Refusal = Callable[[Prompt], str | None]
"""Why the target's template refuses a prompt; None if it takes it."""
_Rank = tuple[int, str, str]
"""Hash of seed and id, id, and what the prompt says: the order of the choice."""


def load_prompts(
    config: PromptsConfig, answers: Answers = "target", *, refusal: Refusal | None = None, tally: Tally | None = None
) -> list[Prompt]:
    """The prompts of a round: ``config.count`` of them, chosen and ordered by a hash of seed and id.

    The choice does not depend on the order of the records, and memory is bounded by ``count`` (times the number of
    strata). A record that comes twice counts once; of different ones with the same id each is named by its content too.
    Records that cannot be used are left out and counted, all that the source has; prompts that the template refuses are
    left out of the choice, and the next ones take their place. Where the source has no more, there are as many prompts
    fewer than asked for, and that is counted too.

    Args:
        config: source, count, seed, strata, system prompt, and how much may be left out.
        answers: ``given`` keeps the conversations' own answers, ``target`` leaves them out.
        refusal: asked about every prompt that is chosen from a file.
        tally: where it is counted what is left out.

    Raises:
        ConfigError: the source cannot be read, too many of its records cannot be used (all kinds are named), or there
            are fewer prompts than asked for and what was left out is not why.
    """
    tally = Tally() if tally is None else tally
    tally.source = config.source
    if config.source.startswith(BUILTIN):
        return [_with_system(prompt, config.system) for prompt in _builtin(config, answers)]
    strata: dict[str, _Smallest] = {}
    # One is always let pass, so the template may refuse one at least.
    spare = max(1, int(config.max_left_out * config.count)) if refusal else 0
    for place, prompt in _usable(config, answers, tally):
        kept = strata.setdefault(_stratum(prompt, config.stratify), _Smallest(config.count + spare, config.seed))
        kept.offer(prompt, place)
    if tally.left_out_count > max(1, config.max_left_out * tally.read):
        raise _too_many(config, f"{tally.left_out_count:,} of {tally.read:,} records", tally)
    return _named(sorted(_choose(strata, config, refusal, tally), key=lambda item: item[0]))


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


def _usable(config: PromptsConfig, answers: Answers, tally: Tally) -> Iterator[tuple[str, Prompt]]:
    for place, record in with_trees_as_conversations(read_records(config.source, tally)):
        tally.read += 1
        try:
            if isinstance(record, Unusable):
                raise record
            prompt, without = to_prompt(record, answers)
            if config.stratify and config.stratify not in prompt.meta:
                raise Unusable(f"has no field {config.stratify!r} to stratify by")
        except Unusable as why:
            tally.leave_out(why, place)
            continue
        for what in without:
            tally.use_without(what, place)
        yield place, prompt


def _choose(
    strata: dict[str, "_Smallest"], config: PromptsConfig, refusal: Refusal | None, tally: Tally
) -> list[tuple[_Rank, Prompt]]:
    """The prompts with the smallest ranks that the template takes, of each stratum its share."""
    shares = _shares(config.count, sorted(strata))
    chosen: dict[tuple[str, str], tuple[_Rank, Prompt]] = {}
    refused = Tally(config.source)
    missing = 0
    for name, share in shares.items():
        taken = 0
        for rank, place, prompt in strata[name].ordered():
            if taken == share:
                break
            if rank[1:] in chosen:
                continue
            asked = _with_system(prompt, config.system)
            reason = refusal(asked) if refusal else None
            if reason is None:
                chosen[rank[1:]] = rank, asked
                taken += 1
                continue
            why = Unusable("is refused by the target's template", reason)
            refused.leave_out(why, place)
            tally.leave_out(why, place)
            if refused.left_out_count > max(1, config.max_left_out * config.count):
                tried = len(chosen) + refused.left_out_count
                raise _too_many(config, f"{refused.left_out_count:,} of the first {tried:,} prompts", tally)
        missing += share - taken
        if missing > tally.left_out_count:
            of = f" with {config.stratify} = {name!r}" if config.stratify else ""
            raise _too_few(config, taken, of, share, tally)
    if not chosen:
        raise _too_few(config, 0, "", config.count, tally)
    if missing:
        used = f"{len(chosen):,} prompts are used where {config.count:,} were asked for"
        tally.notes.append(f"{used}: records are left out")
    return list(chosen.values())


def _too_many(config: PromptsConfig, what: str, tally: Tally) -> ConfigError:
    return ConfigError(
        f"{what} of {config.source} cannot be used: {tally.left_out_text()}",
        expected=f"at most {config.max_left_out:.1%} (one is always let pass)",
        fix="correct the data or generate.answers, prompts.system and prompts.template_args, or raise "
        "prompts.max_left_out if this is meant",
    )


def _too_few(config: PromptsConfig, found: int, of: str, wanted: int, tally: Tally) -> ConfigError:
    left_out = f"; left out: {tally.left_out_text()}" if tally.left_out else ""
    different = "different " if found else ""
    return ConfigError(
        f"{config.source} has {found} {different}prompts{of}, fewer than the {wanted} asked for{left_out}",
        fix="lower prompts.count or bring more prompts",
    )


def _named(chosen: list[tuple[_Rank, Prompt]]) -> list[Prompt]:
    """The prompts with ids that tell them apart: shards of one data set often count anew."""
    times = Counter(prompt.id for _, prompt in chosen)
    return [
        prompt if times[prompt.id] == 1 else replace(prompt, id=f"{prompt.id}-{content}")
        for (_, _, content), prompt in chosen
    ]


def _stratum(prompt: Prompt, field: str) -> str:
    return str(prompt.meta[field]) if field else ""


def _shares(count: int, names: list[str]) -> dict[str, int]:
    """Equal shares that sum to ``count``; the first names get the remainder."""
    each, more = divmod(count, len(names)) if names else (0, 0)
    return {name: each + (position < more) for position, name in enumerate(names)}


class _Smallest:
    """The ``limit`` prompts with the smallest ranks, of however many are offered."""

    def __init__(self, limit: int, seed: int) -> None:
        self._limit, self._seed = limit, seed
        self._heap: list[_Descending] = []
        self._kept: dict[_Rank, tuple[str, Prompt]] = {}

    def offer(self, prompt: Prompt, place: str) -> None:
        """Keep a prompt if it is among the first; the same one again changes nothing."""
        place_in_order = _hash(self._seed, prompt.id)
        if len(self._heap) == self._limit and place_in_order > self._heap[0].rank[0]:
            return
        rank = (place_in_order, prompt.id, content_id(prompt.messages, prompt.turns))
        if rank in self._kept:
            return
        entry = _Descending(rank)
        if len(self._heap) < self._limit:
            heapq.heappush(self._heap, entry)
        else:
            dropped = heapq.heappushpop(self._heap, entry)
            if dropped is entry:
                return
            del self._kept[dropped.rank]
        self._kept[rank] = place, prompt

    def ordered(self) -> Iterator[tuple[_Rank, str, Prompt]]:
        """What is kept, the smallest rank first."""
        for rank in sorted(self._kept):
            yield rank, *self._kept[rank]


@dataclass(frozen=True)
class _Descending:
    """A rank in a heap that gives up its largest."""

    rank: _Rank

    def __lt__(self, other: "_Descending") -> bool:
        return self.rank > other.rank


def _hash(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:16], "big")


def _with_system(prompt: Prompt, system: str) -> Prompt:
    if not system or prompt.messages[0]["role"] == "system":
        return prompt
    return replace(prompt, messages=[{"role": "system", "content": system}, *prompt.messages])
