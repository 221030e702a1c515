"""What is done of a round, step by step, and why a step is not: read from the store, believing verified files only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from infra.errors import StoreError
from infra.results import Convention, Evaluation, Report, Training
from infra.round import stored
from infra.round.context import RoundContext
from infra.round.publication import publication_done
from infra.round.states import faulty_shards, shards_of
from infra.round.stored import samples_done
from infra.store.answers import AnswerLog
from infra.store.hidden import ShardPlan
from infra.store.samples import samples_fault

State = Literal["done", "partly", "stale", "missing"]
PLANNED = ("answers", "samples", "hidden", "draft", "eval", "published", "report")
"""Steps with a key of their own, in the order of the lifecycle."""


@dataclass(frozen=True)
class StepStatus:
    """How far one step is.

    Attributes:
        state: ``done``; ``partly``: the next run goes on with what is there; ``stale``: what is there is of other
            inputs; ``missing``: nothing is there.
        why: why it is not done, for people; of a step that is done, a remark or nothing.
    """

    state: State
    why: str = ""

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.state == "done"


@dataclass(frozen=True)
class RoundStatus:
    """How far a round is, at one moment; :func:`look` makes it.

    Attributes:
        training, evaluation, report, convention: the stored results, where the steps are done.
        engine_may_load: whether the extracting engine may load while other things are done.
    """

    answers: StepStatus
    samples: StepStatus
    parity: StepStatus
    convention_gate: StepStatus
    hidden: StepStatus
    draft: StepStatus
    eval: StepStatus
    published: StepStatus
    reported: StepStatus
    training: Training | None
    evaluation: Evaluation | None
    report: Report | None
    convention: Convention | None
    engine_may_load: bool

    @property
    def done(self) -> set[str]:
        """The steps with a key that are done."""
        return {name for name in PLANNED if self.of(name).done}

    def of(self, step: str) -> StepStatus:
        """The status of a step of :data:`PLANNED`."""
        status: StepStatus = getattr(self, "reported" if step == "report" else step)
        return status

    @property
    def finished(self) -> bool:
        """Whether draft, evaluation, publication and report are all there."""
        return {"draft", "eval", "published", "report"} <= self.done

    @property
    def states_needed(self) -> bool:
        """Whether hidden states are still read: the draft is not trained or not evaluated yet."""
        return self.training is None or self.evaluation is None


def look(context: RoundContext) -> RoundStatus:
    """How far the round is now.

    Sizes and hashes of small files are compared, not every checksum of the states: that is what *verify* is for.
    """
    training, evaluation = stored.training(context), stored.evaluation(context)
    report, convention = stored.report(context), stored.convention(context)
    samples = _samples(context)
    faults = faulty_shards(context, deep=False) if samples.done else None
    return RoundStatus(
        answers=_answers(context, samples),
        samples=samples,
        parity=_parity(context),
        convention_gate=_convention(context, convention, bool(faults) or faults is None),
        hidden=_hidden(context, faults, training),
        draft=_result(context, "draft", training, "no draft is trained yet"),
        eval=_result(context, "eval", evaluation, "the draft is not evaluated yet"),
        published=StepStatus("done")
        if publication_done(context)
        else _absent(context, "published", "not published yet"),
        reported=_result(context, "report", report, "no report is written yet"),
        training=training,
        evaluation=evaluation,
        report=report,
        convention=convention,
        engine_may_load=_engine_may_load(context, convention),
    )


def _answers(context: RoundContext, samples: StepStatus) -> StepStatus:
    prefix = context.prefix("answers")
    if samples.done or AnswerLog.finished(context.store, prefix):
        return StepStatus("done")
    if context.store.list(prefix):
        return StepStatus("partly", "some prompts are answered")
    return _absent(context, "answers", "no prompt is answered yet")


def _samples(context: RoundContext) -> StepStatus:
    if samples_done(context):
        return StepStatus("done")
    fault = samples_fault(context.store, context.prefix("samples"))
    return _absent(context, "samples", fault or "their counts are not there")


def _parity(context: RoundContext) -> StepStatus:
    if context.config.extract.engine == context.config.serve_with:
        return StepStatus("done", "one engine extracts and serves")
    if stored.parity(context) is not None:
        return StepStatus("done")
    return StepStatus("missing", "the two engines were not found to agree yet")


def _convention(context: RoundContext, measured: Convention | None, states_missing: bool) -> StepStatus:
    """States that are whole are not held up for a reference that was missing when they were made."""
    if measured is None:
        return StepStatus("missing", "the captured layers were not measured yet")
    unchecked = not measured.reference and context.config.gates.convention.reference != "none"
    if unchecked and states_missing:
        return StepStatus("stale", "the captured layers were let pass without a reference, and there is one now")
    return StepStatus("done")


def _hidden(context: RoundContext, faults: Mapping[ShardPlan, str] | None, training: Training | None) -> StepStatus:
    """States that a draft was trained on may be gone: they count as done as long as nothing asks for them."""
    if faults is None:
        return _absent(context, "hidden", "the samples are not prepared yet")
    if not faults:
        return StepStatus("done")
    if training is not None:
        return StepStatus("done", "not all are there, and the draft is trained")
    total = len(shards_of(context))
    if len(faults) == total and not context.store.list(context.prefix("hidden")):
        return _absent(context, "hidden", "no states are extracted yet")
    return StepStatus("partly", f"{total - len(faults)} of {total} shards verify: {next(iter(faults.values()))}")


def _result(context: RoundContext, step: str, result: object, why: str) -> StepStatus:
    return StepStatus("done") if result is not None else _absent(context, step, why)


def _absent(context: RoundContext, step: str, why: str) -> StepStatus:
    """A step of which this round's key has nothing; what another key made is told."""
    try:
        live = context.rounds.current(step)
    except StoreError as error:
        return StepStatus("missing", f"{why} ({error.what})")
    if live is not None and live.key != getattr(context.keys, step):
        return StepStatus("stale", f"{why}; what is there is of other inputs (key {live.key})")
    return StepStatus("missing", why)


def _engine_may_load(context: RoundContext, convention: Convention | None) -> bool:
    """On GPUs not beside the convention gate's reference, which takes room of its own there.

    An engine that sizes its cache meanwhile gets the rest, or fails, and another rung would be remembered for it.
    """
    on_gpus, reference = context.extracting.device == "cuda", context.config.gates.convention.reference
    return not on_gpus or reference == "none" or (convention is not None and bool(convention.reference))
