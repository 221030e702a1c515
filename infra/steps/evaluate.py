"""The evaluate step: predict acceptance from held-out states, then measure it where the draft is served."""

from collections.abc import Sequence
from pathlib import Path

from infra.data.gate import leakage_gate
from infra.drafter import acceptance as chain
from infra.drafter.paired import PairedAnswer, compare_steps, pair
from infra.drafter.walk import WalkResult, answer_span, walk
from infra.engines.client.bench import Measurement, Run, interval, looping, ratio_interval, summary
from infra.errors import EngineError, GateError
from infra.results import Acceptance, Evaluation, Measured, Paired, Predicted, Speed
from infra.round.context import RoundContext
from infra.round.states import extracted_samples
from infra.steps.measure import FEW_IN_FLIGHT, LiveRuns, PromptSet
from infra.store.samples import Sample

HELDOUT = "heldout"
LATE_CLIENT = 0.5
"""Share of the time between tokens that the client may be late; beyond, latencies are its own."""


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
    few = min(FEW_IN_FLIGHT, max(config.evaluate.concurrencies))
    asked = config.evaluate
    return [
        PromptSet(HELDOUT, heldout, config.generate.max_tokens, (few,), greedy=True),
        PromptSet(
            "evaluation",
            evaluation_ids(context),
            asked.max_tokens,
            asked.concurrencies,
            seconds=asked.steady_seconds,
        ),
    ]


def heldout_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """The first ``count`` held-out samples: the prediction and the live run use the same ones."""
    heldout = (sample for sample in samples if sample.split == "heldout")
    return [sample for _, sample in zip(range(count), heldout, strict=False)]


def judge(
    context: RoundContext,
    predicted: Predicted,
    live: LiveRuns,
    sets: Sequence[PromptSet],
    how: str,
    paired: Paired | None = None,
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
        paired=paired,
    )


def pair_steps(context: RoundContext, walked: WalkResult, live: LiveRuns, sets: Sequence[PromptSet]) -> Paired:
    """The held-out prompts' served steps beside what the walk says of them."""
    [concurrency] = next(item.concurrencies for item in sets if item.name == HELDOUT)
    samples = heldout_samples(extracted_samples(context), context.config.evaluate.heldout_count)
    return pair_runs(context, samples, walked, live.of(HELDOUT, concurrency, True))


def pair_runs(context: RoundContext, samples: Sequence[Sample], walked: WalkResult, runs: Sequence[Run]) -> Paired:
    """Steps of runs over the samples' prompts, greedy and with the draft, beside the walk over the samples."""
    served = {answer.prompt_ids: answer for single in runs for answer in single.timed}
    accepted = {sample.row: sample.accepted for sample in walked.samples}
    answers: list[PairedAnswer] = []
    for sample in samples:
        first, end = answer_span(sample)
        answer = served.get(tuple(sample.input_ids[:first]))
        if answer is not None and sample.row in accepted:
            sizes = [count for _, count in answer.moments]
            stored = sample.input_ids[first:end]
            drafts = context.config.evaluate.drafts
            answers.append(pair(stored, accepted[sample.row], answer.token_ids, sizes, drafts))
    return compare_steps(
        answers,
        pieces=sum(answer.pieces for single in runs for answer in single.timed),
        counted=sum(single.counters.drafts for single in runs if single.counters is not None),
        bound=context.config.evaluate.step_tolerance,
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


def late_client(evaluation: Evaluation) -> list[str]:
    """Where the client that measured was too late for its latencies to be believed, a sentence each."""
    found = []
    for item in evaluation.measured:
        for side, name in ((item.plain, "without"), (item.draft, "with")):
            if side.client_lag is not None and side.client_lag > LATE_CLIENT * side.between_tokens_p50:
                found.append(
                    f"while it measured the {item.prompts} prompts at {item.concurrency} in flight {name} the draft, "
                    f"the client was up to {1000 * side.client_lag:.1f} ms late (95th percentile): latencies may be "
                    "its own"
                )
    return found


def _measured(prompt_set: PromptSet, concurrency: int, live: LiveRuns, drafts: int) -> Measured:
    with_draft, plain = (live.of(prompt_set.name, concurrency, draft) for draft in (True, False))
    drafted, undrafted = summary(with_draft), summary(plain)
    return Measured(
        prompts=prompt_set.name,
        concurrency=concurrency,
        acceptance=_live_acceptance(with_draft, drafted, drafts),
        draft=_speed(drafted),
        plain=_speed(undrafted),
        speed_up=ratio_interval(drafted.rates, undrafted.rates),
        looping=sum(looping(answer) for answer in drafted.answers) / max(1, len(drafted.answers)),
    )


def _live_acceptance(runs: Sequence[Run], measurement: Measurement, drafts: int) -> Acceptance:
    """From the engine's own counters; the interval from how many tokens each prompt's steps brought.

    The counters are the engine's totals. A prompt's own steps are seen by the client: one piece of the stream a step.
    All answers to one prompt are one part.
    """
    counters = measurement.counters
    if counters is None:
        raise EngineError(
            "the engine counts no drafts",
            expected="counters of speculative decoding",
            fix="read the engine's log: is the draft loaded?",
        )
    total = chain.ChainCounts(counters.drafts, counters.accepted_per_position[:drafts])
    parts: dict[tuple[int, ...], list[chain.ChainCounts]] = {}
    for answer in (answer for single in runs for answer in single.timed):
        accepted = max(0, len(answer.token_ids) - answer.moments[0][1] - answer.pieces)
        parts.setdefault(answer.prompt_ids, []).append(chain.ChainCounts(answer.pieces, (accepted,)))
    found = _acceptance(total, [part for part in map(chain.pooled, parts.values()) if part.starts])
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
        between_tokens_p99=measurement.itl_p99,
        most_in_flight=measurement.most_in_flight,
        mean_in_flight=measurement.mean_in_flight,
        steady_seconds=measurement.steady_seconds,
        runs=len(measurement.rates),
        interval=interval(measurement.rates),
        client_lag=measurement.client_lag,
    )


def walk_heldout(context: RoundContext, draft: Path) -> WalkResult:
    """Walk the chain over the stored states of the held-out samples that are also served live."""
    return walk(
        draft,
        heldout_samples(extracted_samples(context), context.config.evaluate.heldout_count),
        states_url=context.settings.store,
        states_prefix=context.prefix("hidden"),
        drafts=context.config.evaluate.drafts,
        workdir=context.scratch / "walk",
        run_dir=context.settings.run_dir,
    )


def prediction(walked: WalkResult) -> Predicted:
    """What the walk predicts for serving."""
    return Predicted(
        acceptance=_acceptance(walked.predicted, walked.parts), joint=walked.joint, conditional=walked.conditional
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
