"""The evaluate step: predict acceptance from held-out states, then measure it where the draft is served."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.data.gate import leakage_gate
from infra.drafter import acceptance as chain
from infra.drafter.walk import walk
from infra.engines.client.bench import Measurement, Run, looping, run, summary, warm_up
from infra.engines.client.client import Client, Sampling
from infra.errors import EngineError, GateError
from infra.machine.host import memory_available
from infra.results import Acceptance, Evaluation, Measured, Predicted, Speed
from infra.round.context import RoundContext
from infra.round.serving import Serving
from infra.round.states import extracted_samples
from infra.store.samples import Sample

log = logging.getLogger(__name__)

SERVER_OVERHEAD_BYTES = 4 << 30
"""Memory of a CPU server besides weights: runtime, activations and a 2 GiB KV cache."""
WARM_UP_PROMPTS = 4
HELDOUT = "heldout"
BLOCKS = 4
LAUNCHES = 2
"""How often the turn comes to each server in ``abba``."""


class ServerLost(EngineError):
    """A server died or hung while it was measured: a measurement with a hole is none, and all is measured again."""


@dataclass(frozen=True)
class PromptSet:
    """Token ids of prompts that are served live."""

    name: str
    prompts: list[list[int]]
    max_tokens: int
    concurrencies: tuple[int, ...]


def evaluation_gate(context: RoundContext) -> None:
    """Stop a round that could not be measured in the end, or on nothing new; for the time before anything is made.

    Raises:
        GateError: an evaluation prompt is trained on, or all are too long.
    """
    leakage_gate(context.prompts, context.evaluation_prompts)
    longest = context.config.evaluate.prompts.max_prompt_tokens
    if not evaluation_ids(context):
        raise GateError(
            "data",
            f"none of the {len(context.evaluation_prompts)} evaluation prompts is left",
            expected=f"prompts of at most {longest} tokens (evaluate.prompts.max_prompt_tokens)",
            fix="raise evaluate.prompts.max_prompt_tokens, or give evaluate.prompts.source shorter ones",
        )


def evaluation_ids(context: RoundContext) -> list[list[int]]:
    """Token ids of the evaluation prompts' first turns, without those that are too long."""
    prompts = context.config.evaluate.prompts
    rendered = (
        context.chat.render(prompt.messages, prompts.template_args, add_generation_prompt=True)
        for prompt in context.evaluation_prompts
    )
    return [ids for ids in rendered if len(ids) <= prompts.max_prompt_tokens]


def prompt_sets(context: RoundContext) -> list[PromptSet]:
    """The evaluation prompts, and the held-out prompts for the comparison with the prediction."""
    config = context.config
    heldout = [
        sample.input_ids[: sample.loss_mask.index(1)]
        for sample in heldout_samples(extracted_samples(context), config.evaluate.heldout_count)
    ]
    busiest = max(config.evaluate.concurrencies)
    return [
        PromptSet(HELDOUT, heldout, config.generate.max_tokens, (busiest,)),
        PromptSet("evaluation", evaluation_ids(context), config.evaluate.max_tokens, config.evaluate.concurrencies),
    ]


def heldout_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """The first ``count`` held-out samples: the prediction and the live run use the same ones."""
    heldout = (sample for sample in samples if sample.split == "heldout")
    return [sample for _, sample in zip(range(count), heldout, strict=False)]


def layout(context: RoundContext) -> str:
    """How the two servers share the machine: ``interleaved`` when both fit, else ``abba``."""
    asked = context.config.evaluate.layout
    if asked != "auto":
        return asked
    if context.serving.device != "cpu":
        return "abba"
    needed = 2 * (2 * context.target.shape.weight_bytes + SERVER_OVERHEAD_BYTES)
    return "interleaved" if memory_available() > needed else "abba"


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
    the same noise. ``abba``: one server at a time, half of the prompts in each of A B B A; all of them in each where
    halves would be too few for the requests in flight (:func:`split`). The two B share a launch.
    """
    live = LiveRuns({})
    order = ((False, 0), (True, 0), (True, 1), (False, 1))
    if how == "interleaved":
        begin_both(context, plain, drafted)
        servers = {False: plain, True: drafted}
        clients = {with_draft: _warm(serving, sets) for with_draft, serving in servers.items()}
        for prompt_set in sets:
            for concurrency in prompt_set.concurrencies:
                blocks = split(prompt_set.prompts, BLOCKS, concurrency)
                for number, block in enumerate(blocks):
                    for with_draft in (False, True) if number % 2 == 0 else (True, False):
                        done = _serve(servers[with_draft], clients[with_draft], prompt_set, block, concurrency)
                        live.add((prompt_set.name, concurrency, with_draft), done)
                    log.info(f"{prompt_set.name} at {concurrency}: block {number + 1}/{len(blocks)} served")
        return live
    for with_draft, half in order:
        serving = drafted if with_draft else plain
        client = _warm(serving, sets)
        for prompt_set in sets:
            for concurrency in prompt_set.concurrencies:
                blocks = split(prompt_set.prompts, LAUNCHES, concurrency)
                done = _serve(serving, client, prompt_set, blocks[half % len(blocks)], concurrency)
                live.add((prompt_set.name, concurrency, with_draft), done)
                what = f"half {half + 1}/{LAUNCHES}" if len(blocks) == LAUNCHES else "all prompts"
                log.info(f"{prompt_set.name} at {concurrency}: {what} served, draft: {with_draft}")
        if (with_draft, half) != (True, 0):  # it is the next one's server, too
            serving.stop()
    return live


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
    """At most ``blocks`` even blocks, none smaller than twice the concurrency unless there is only one."""
    count = max(1, min(blocks, len(prompts) // (2 * concurrency)))
    return [prompts[number::count] for number in range(count)]


def judge(
    context: RoundContext, predicted: Predicted, live: LiveRuns, sets: Sequence[PromptSet], how: str
) -> Evaluation:
    """The live figures beside the prediction."""
    measured = [
        _measured(prompt_set, concurrency, live, context.config.evaluate.drafts)
        for prompt_set in sets
        for concurrency in prompt_set.concurrencies
    ]
    reference = next(item for item in measured if item.prompts == HELDOUT)
    return Evaluation(
        engine=context.config.serve_with,
        engine_version=context.versions[context.config.serve_with],
        drafts=context.config.evaluate.drafts,
        layout=how,
        predicted=predicted,
        measured=tuple(measured),
        deviation=reference.acceptance.length / predicted.acceptance.length - 1,
        tolerance=context.config.evaluate.tolerance,
    )


def compared(evaluation: Evaluation) -> tuple[chain.ChainCounts, chain.ChainCounts]:
    """(predicted, live) counts on the same held-out prompts, for the serving gate."""
    live = next(item for item in evaluation.measured if item.prompts == HELDOUT)
    return _counts(evaluation.predicted.acceptance), _counts(live.acceptance)


def _counts(acceptance: Acceptance) -> chain.ChainCounts:
    accepted = tuple(round(share * acceptance.starts) for share in acceptance.by_position)
    return chain.ChainCounts(acceptance.starts, accepted)


def shortfalls(context: RoundContext, evaluation: Evaluation, sets: Sequence[PromptSet]) -> list[str]:
    """Where less was measured than the round asks for, a sentence each."""
    found = []
    heldout, asked = next(len(item.prompts) for item in sets if item.name == HELDOUT), context.config.evaluate
    if heldout < asked.heldout_count:
        found.append(
            f"there are {heldout} held-out samples to serve, fewer than the {asked.heldout_count} asked for "
            "(evaluate.heldout_count)"
        )
    for item in evaluation.measured:
        most = [side.most_in_flight for side in (item.plain, item.draft) if side.most_in_flight is not None]
        if most and min(most) < item.concurrency:
            found.append(
                f"the {item.prompts} prompts were to be served {item.concurrency} at a time; there were never more "
                f"than {min(most)} in flight (more prompts, or a lower evaluate.concurrencies)"
            )
    return found


def _measured(prompt_set: PromptSet, concurrency: int, live: LiveRuns, drafts: int) -> Measured:
    with_draft, plain = (live.of(prompt_set.name, concurrency, draft) for draft in (True, False))
    drafted = summary(with_draft)
    repeated = sum(len(single.timed) for single in with_draft) > len(prompt_set.prompts)
    return Measured(
        prompts=prompt_set.name,
        concurrency=concurrency,
        acceptance=_live_acceptance(with_draft, drafted, drafts, repeated),
        draft=_speed(drafted),
        plain=_speed(summary(plain)),
        looping=sum(looping(answer) for answer in drafted.answers) / max(1, len(drafted.answers)),
    )


def _live_acceptance(runs: Sequence[Run], measurement: Measurement, drafts: int, repeated: bool) -> Acceptance:
    """From the engine's own counters; the interval from how many tokens each prompt's steps brought.

    The counters are the engine's totals. A prompt's own steps are seen by the client: one piece of the stream a step.

    Args:
        repeated: each run served every prompt; a prompt's steps in all of them are one part then.
    """
    counters = measurement.counters
    if counters is None:
        raise EngineError(
            "the engine counts no drafts",
            expected="counters of speculative decoding",
            fix="read the engine's log: is the draft loaded?",
        )
    total = chain.ChainCounts(counters.drafts, counters.accepted_per_position[:drafts])
    parts = [
        chain.ChainCounts(item.pieces, (max(0, len(item.token_ids) - 1 - item.pieces),))
        for single in runs
        for item in single.timed
    ]
    if repeated:
        count = len(parts) // len(runs)
        parts = [chain.pooled(parts[number::count]) for number in range(count)]
    found = _acceptance(total, [part for part in parts if part.starts])
    return found.model_copy(update={"drafted": counters.draft_tokens / counters.drafts if counters.drafts else None})


def _speed(measurement: Measurement) -> Speed:
    return Speed(
        output_tokens=measurement.output_tokens,
        seconds=measurement.seconds,
        tokens_per_second=measurement.tokens_per_second,
        first_token_p50=measurement.ttft_p50,
        first_token_p95=measurement.ttft_p95,
        between_tokens_p50=measurement.itl_p50,
        between_tokens_p95=measurement.itl_p95,
        most_in_flight=measurement.most_in_flight,
        mean_in_flight=measurement.mean_in_flight,
    )


def predict(context: RoundContext, draft: Path) -> Predicted:
    """Walk the chain over the stored states of the held-out samples that are also served live."""
    result = walk(
        draft,
        heldout_samples(extracted_samples(context), context.config.evaluate.heldout_count),
        states_url=context.settings.store,
        states_prefix=context.prefix("hidden"),
        drafts=context.config.evaluate.drafts,
        workdir=context.scratch / "walk",
        run_dir=context.settings.run_dir,
    )
    return Predicted(
        acceptance=_acceptance(result.predicted, result.parts), joint=result.joint, conditional=result.conditional
    )


def _acceptance(total: chain.ChainCounts, parts: Sequence[chain.ChainCounts]) -> Acceptance:
    interval = chain.bootstrap(parts)
    return Acceptance(
        length=total.length,
        interval=(interval.low, interval.high),
        by_position=total.by_position,
        starts=total.starts,
        prompts=len(parts),
    )


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
            sampling=Sampling.of(serving.context.config.evaluate, prompt_set.max_tokens),
            concurrency=concurrency,
            flights=serving.flights,
        )


@contextmanager
def _attended(serving: Serving) -> Iterator[None]:
    """Around requests to a server: where it died of them or hung, the error says so."""
    try:
        yield
    except EngineError as error:
        if (why := serving.death(error)) is not None:
            raise ServerLost(f"{serving.name} died while it was measured: {why}") from error
        raise
