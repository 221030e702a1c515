"""What differs between the HTTP interfaces of the engines: a dialect knows paths, payloads and how to read answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from infra.config.sampling import SAMPLING, SamplingConfig
from infra.engines.client.counters import SpecCounters
from infra.errors import EngineError


class RequestRefused(EngineError):
    """The engine refuses this one request (4xx); the server itself is well."""


@dataclass(frozen=True)
class Sampling:
    """How an answer is sampled; greedy, and nothing but the target's own logits, unless more is said.

    Args:
        max_tokens: longest answer, tokens.
        temperature: 0 is greedy.
        top_p: share of the probability that is sampled from.
        seed: sampling seed.
        top_k: sampled from so many of the likeliest tokens; 0 is no bound.
        min_p: least probability of what is sampled, as a share of the likeliest token's.
        repetition_penalty: divides the logits of tokens that are there already; 1 is none.
        presence_penalty: taken from the logits of tokens that the answer has; 0 is none.
        frequency_penalty: the same, once for each time.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @classmethod
    def of(cls, config: SamplingConfig, max_tokens: int, seed: int = 0) -> Self:
        """What a section of the round says."""
        return cls(max_tokens, seed=seed, **{name: getattr(config, name) for name in SAMPLING})


@dataclass(frozen=True)
class Generation:
    """An answer.

    Args:
        token_ids: the answer's tokens; ends with the end-of-turn token when ``finish_reason`` is "stop".
        finish_reason: "stop", or "length" when it was cut at ``max_tokens``.
        prompt_ids: the prompt as the engine had it, equal to what was sent.
    """

    token_ids: list[int]
    finish_reason: str
    prompt_ids: list[int]


class Piece(NamedTuple):
    """What one event of a streamed answer brings.

    Args:
        token_ids: tokens that no earlier event had.
        finish_reason: as in :class:`Generation`; empty until the end.
        prompt_ids: the prompt as the engine had it; None when this event does not say.
    """

    token_ids: list[int]
    finish_reason: str
    prompt_ids: list[int] | None


class StatesFile(NamedTuple):
    """Where the hidden states of a request are.

    Args:
        path: the file that the engine writes them to; an exclusive lock on ``<path>.lock`` is held until it has.
        next_token: the token that the engine, greedy, went on with.
        layer_ids: the engine's ids of the layers it captured; None when it does not say.
    """

    path: str
    next_token: int
    layer_ids: tuple[int, ...] | None


class Dialect(Protocol):
    """One engine's way of being asked. Payloads and answers are JSON objects."""

    completions: str
    """Path that answers prompts."""
    tokenize: str
    """Path that renders and tokenises conversations."""
    counters: str | None
    """Path of the page with the counters of speculative decoding; None when each answer has its own share."""

    def completion(self, prompt_ids: Sequence[int], sampling: Sampling, *, stream: bool = False) -> dict[str, Any]:
        """A request that names every sampling value, so that no default of the target's generation_config gets in."""
        ...

    def answer(self, prompt_ids: Sequence[int], reply: Mapping[str, Any]) -> Generation:
        """Read the reply to :meth:`completion`.

        Raises:
            RequestRefused: the engine took the request and then refused it.
            EngineError: it is no answer to this prompt.
        """
        ...

    def piece(self, event: Mapping[str, Any], known: int) -> Piece:
        """Read one event of a streamed reply, of which ``known`` tokens have been read; raises as :meth:`answer`."""
        ...

    def extraction(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """A request for hidden states; made anew for each try."""
        ...

    def extracted(self, token_ids: Sequence[int], reply: Mapping[str, Any]) -> StatesFile:
        """Read the reply to :meth:`extraction`.

        Raises:
            ExtractionFault: there are no states of these tokens.
        """
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]) -> dict[str, Any]:
        """A request for the token ids of a conversation, the assistant's opening included; the reply has ``tokens``."""
        ...

    def counted(self, text: str) -> SpecCounters | None:
        """Read the page at :attr:`counters`; None when the engine serves without a draft."""
        ...

    def share(self, reply: Mapping[str, Any]) -> SpecCounters | None:
        """What one reply, or the last event of a streamed one, counted; None when the counters are on a page."""
        ...


def check_prompt(sent: Sequence[int], seen: Sequence[int] | None) -> None:
    """Make sure that an engine worked on what it was sent.

    Raises:
        EngineError: it worked on other tokens, or does not say.
    """
    if seen is None or list(seen) != list(sent):
        got = "no prompt" if seen is None else f"a prompt of {len(seen)} tokens"
        raise EngineError(
            f"the engine answered {got} that is not the one of {len(sent)} tokens it was sent",
            expected="the same token ids back",
        )


def ids_of(answer: Mapping[str, Any], key: str) -> list[int]:
    """Token ids of an answer.

    Raises:
        EngineError: it has none.
    """
    ids = answer.get(key)
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise EngineError(
            f"the engine answered without token ids: {str(ids)[:100]}", expected=f"a list `{key}` of them in its answer"
        )
    return ids
