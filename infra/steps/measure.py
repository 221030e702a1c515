"""Serving prompt sets without and with the draft: which blocks, in which order, on which servers."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from infra.config.round import RoundConfig
from infra.engines.client.bench import Run, run, warm_up
from infra.engines.client.client import Client, Sampling
from infra.errors import EngineError
from infra.machine.host import memory_available
from infra.round.context import RoundContext
from infra.round.needs import CPU_SERVER_BYTES
from infra.round.rates import STARTS
from infra.round.serving import Serving

log = logging.getLogger(__name__)

WARM_UP_PROMPTS = 4
FEW_IN_FLIGHT = 4
"""Held-out prompts are served so many at a time at most: a busy server joins steps in one piece of the stream."""
BLOCKS = 4
TURNS = 2
"""How often it is each side's turn in ``abba``."""


class ServerLost(EngineError):
    """A server died or hung while it was measured: a measurement with a hole is none, and all is measured again."""


@dataclass(frozen=True)
class PromptSet:
    """Token ids of prompts that are served live.

    Args:
        name: of the set.
        prompts: token ids.
        max_tokens: longest answer.
        concurrencies: requests in flight, one measurement each.
        greedy: whether the answers are greedy whatever the round says; the walk predicts greedy ones.
        seconds: least steady state of a run; 0 serves every prompt once.
    """

    name: str
    prompts: list[list[int]]
    max_tokens: int
    concurrencies: tuple[int, ...]
    greedy: bool = False
    seconds: float = 0.0


def layout(context: RoundContext) -> str:
    """How the two servers share the machine: ``interleaved`` when both fit, else ``abba``."""
    asked = context.config.evaluate.layout
    if asked != "auto":
        return asked
    if context.serving.device != "cpu":
        return "abba"
    needed = 2 * (2 * context.target.shape.weight_bytes + CPU_SERVER_BYTES)
    return "interleaved" if memory_available() > needed else "abba"


def planned_serving(config: RoundConfig, answer: float, rate: float) -> tuple[float, int]:
    """(engine starts waited for, tokens served) of the evaluation, by the layout that it will most likely have.

    Args:
        config: the round.
        answer: tokens of a held-out answer.
        rate: tokens served a second; a run goes on until its steady state is long enough.
    """
    asked = config.evaluate
    abba = asked.layout == "abba" or (asked.layout == "auto" and config.engines[config.serve_with].device != "cpu")
    few = min(FEW_IN_FLIGHT, max(asked.concurrencies))
    sets = [(asked.prompts.count, asked.max_tokens, flight, asked.steady_seconds) for flight in asked.concurrencies]
    tokens = 0.0
    for count, length, flight, steady in [*sets, (asked.heldout_count, answer, few, 0.0)]:
        blocks = max(1, min(BLOCKS, count // flight))
        runs = BLOCKS if steady else max(blocks, TURNS) if abba else blocks
        tokens += 2 * runs * max(count / blocks * length, steady * rate)
    return STARTS["abba" if abba else "interleaved"], round(tokens)


@dataclass
class LiveRuns:
    """Runs gathered so far, by (prompt set, concurrency, with draft)."""

    runs: dict[tuple[str, int, bool], list[Run]]

    def add(self, key: tuple[str, int, bool], run: Run) -> None:
        """Keep one block's run."""
        self.runs.setdefault(key, []).append(run)

    def of(self, name: str, concurrency: int, draft: bool) -> list[Run]:
        """All blocks of one measurement."""
        return self.runs[(name, concurrency, draft)]


def measure(context: RoundContext, plain: Serving, drafted: Serving, sets: Sequence[PromptSet], how: str) -> LiveRuns:
    """Serve every prompt set without and with the draft.

    Interleaved: both servers are up and blocks of prompts alternate A B B A, one block at a time, so that both see
    the same noise. ``abba``: one server at a time in turns A B B A, half of the blocks each turn; all prompts each turn
    where they are too few to be halved (:func:`split`). The two B share a launch.
    """
    live = LiveRuns({})
    if how == "interleaved":
        begin_both(context, plain, drafted)
        servers = {False: plain, True: drafted}
        clients = {with_draft: _warm(serving, sets) for with_draft, serving in servers.items()}
        for prompt_set, concurrency, blocks in _blocks(sets):
            for number, block in enumerate(blocks):
                for with_draft in (False, True) if number % 2 == 0 else (True, False):
                    done = _serve(servers[with_draft], clients[with_draft], prompt_set, block, concurrency)
                    live.add((prompt_set.name, concurrency, with_draft), done)
                log.info(f"{prompt_set.name} at {concurrency}: block {number + 1}/{len(blocks)} served")
        return live
    for with_draft, turn in ((False, 0), (True, 0), (True, 1), (False, 1)):
        serving = drafted if with_draft else plain
        client = _warm(serving, sets)
        for prompt_set, concurrency, blocks in _blocks(sets):
            own = blocks[turn::TURNS] or blocks
            for block in own:
                done = _serve(serving, client, prompt_set, block, concurrency)
                live.add((prompt_set.name, concurrency, with_draft), done)
            what = f"blocks of turn {turn + 1}/{TURNS}" if own != blocks else "all prompts"
            log.info(f"{prompt_set.name} at {concurrency}: {what} served, draft: {with_draft}")
        if (with_draft, turn) != (True, 0):  # it is the next turn's server, too
            serving.stop()
    return live


def _blocks(sets: Sequence[PromptSet]) -> Iterator[tuple[PromptSet, int, list[list[list[int]]]]]:
    """Each measurement and its blocks; where speed is measured they are served again until there are enough runs."""
    for prompt_set in sets:
        for concurrency in prompt_set.concurrencies:
            blocks = split(prompt_set.prompts, BLOCKS, concurrency)
            runs = BLOCKS if prompt_set.seconds else len(blocks)
            yield prompt_set, concurrency, [blocks[number % len(blocks)] for number in range(runs)]


def begin_both(context: RoundContext, plain: Serving, drafted: Serving) -> None:
    """Start both servers; on CUDA the second one only when the first is ready.

    An engine sizes its KV cache by the card's free memory: of two that load at once each takes the other's
    allocations for its own (seen with vLLM 0.24.0: 0.5 GiB of cache beside 54 GiB).
    """
    plain.begin()
    if context.serving.device == "cuda":
        plain.ready(context.config.generate.timeout_seconds)
    drafted.begin()


def split(prompts: list[list[int]], blocks: int, concurrency: int) -> list[list[list[int]]]:
    """At most ``blocks`` even blocks, none smaller than the concurrency unless there is only one."""
    count = max(1, min(blocks, len(prompts) // concurrency))
    return [prompts[number::count] for number in range(count)]


def _warm(serving: Serving, sets: Sequence[PromptSet]) -> Client:
    """A client of the server when it is ready and has answered a few prompts that count nowhere."""
    client = serving.watched(serving.context.config.generate.timeout_seconds)
    with _attended(serving):
        warm_up(client, sets[-1].prompts[:WARM_UP_PROMPTS], concurrency=WARM_UP_PROMPTS, flights=serving.flights)
    return client


def _serve(serving: Serving, client: Client, prompt_set: PromptSet, prompts: list[list[int]], concurrency: int) -> Run:
    with _attended(serving):
        return run(
            client,
            prompts,
            sampling=_sampling(serving.context, prompt_set),
            concurrency=concurrency,
            seconds=prompt_set.seconds,
            flights=serving.flights,
        )


def _sampling(context: RoundContext, prompt_set: PromptSet) -> Sampling:
    if prompt_set.greedy:
        return Sampling(prompt_set.max_tokens)
    return Sampling.of(context.config.evaluate, prompt_set.max_tokens)


@contextmanager
def _attended(serving: Serving) -> Iterator[None]:
    """Around requests to a server: where it died of them or hung, the error says so."""
    try:
        yield
    except EngineError as error:
        if (why := serving.death(error)) is not None:
            raise ServerLost(f"{serving.name} died while it was measured: {why}") from error
        raise
