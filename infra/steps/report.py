"""The report step: the whole round in one object, report.md with figures, and what the next plan learns from it."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from infra.config.round import RoundConfig
from infra.config.sampling import sampling_words
from infra.errors import StoreError
from infra.results import REPORT, Evaluation, LeftOut, OtherRound, Report, Training
from infra.round import stored
from infra.round.context import RoundContext
from infra.round.draft_layouts import layouts
from infra.round.ledger import Ledger
from infra.round.needs import asked_answers
from infra.round.publication import draft_name, published_prefix, publishing_rounds
from infra.round.rates import STARTS, Rates, learn
from infra.round.sampling import answering_words, sampling_notes
from infra.round.stored import sample_counts
from infra.steps.plan import Plan
from infra.store.rounds import RoundStore, read_stored


def build_report(
    context: RoundContext, plan: Plan, training: Training, evaluation: Evaluation, ledger: Ledger
) -> Report:
    """Everything known about the round at this moment."""
    engine = context.config.extract.engine
    samples = context.samples
    published = f"{context.settings.store}/{published_prefix(context)}"
    counts = {
        "samples": len(samples),
        "tokens": samples.tokens,
        "supervised_tokens": samples.supervised,
        **sample_counts(context),
    }
    return Report(
        round=context.config.name,
        description=context.config.description,
        target=context.target.name,
        target_revision=context.target.revision,
        draft=draft_name(context),
        published=f"{published}/{context.config.serve_with}",
        taps=context.config.extract.taps,
        engine=engine,
        engine_version=context.versions[engine],
        versions=context.versions,
        steps=tuple(ledger.times),
        counts=counts,
        sampling=_sampling(context.config),
        training=training,
        evaluation=evaluation,
        convention=stored.convention(context),
        parity=stored.parity(context),
        layouts=layouts(context, published),
        others=other_rounds(context),
        left_out=left_out(context),
        planned_disk_bytes=plan.disk_bytes,
        used_disk_bytes=ledger.peak_bytes,
        planned_seconds=plan.seconds,
        used_seconds=sum(item.seconds for item in ledger.times),
        notes=(
            *ledger.notes,
            *(note for tally in context.left_out.values() for note in tally.notes),
            *sampling_notes(context),
        ),
    )


def left_out(context: RoundContext) -> tuple[LeftOut, ...]:
    """Records that were not used, or not with all that they carry, by source and kind."""
    return tuple(
        LeftOut(prompts=name, kind=kind, used=used, count=found.count, read=tally.read, examples=tuple(found.examples))
        for name, tally in context.left_out.items()
        for used, kinds in ((False, tally.left_out), (True, tally.without))
        for kind, found in kinds.items()
    )


def _sampling(config: RoundConfig) -> dict[str, str]:
    given = config.generate.answers == "given"
    return {
        "answers": "given by the data" if given else answering_words(config.generate),
        "measured answers": sampling_words(config.evaluate),
    }


def other_rounds(context: RoundContext) -> tuple[OtherRound, ...]:
    """Live acceptance of the other rounds that published a draft for this target, as far as their reports read."""
    reports = (_live_report(rounds) for rounds in publishing_rounds(context))
    return tuple(report.in_brief() for report in reports if report is not None)


def _live_report(rounds: RoundStore) -> Report | None:
    try:
        pointer = rounds.current("report")
    except StoreError:
        return None
    if pointer is None:
        return None
    return read_stored(rounds.store, f"{rounds.step_prefix('report', pointer.key)}/{REPORT}", Report)


def write_report(context: RoundContext, report: Report, files: Mapping[str, bytes]) -> str:
    """Store the report's files (report.md, figures) and, last, report.json; returns report.md's URL."""
    prefix = context.prefix("report")
    for name, data in files.items():
        context.store.put(f"{prefix}/{name}", data)
    stored.write_result(context, "report", REPORT, report)
    return f"{context.settings.store}/{prefix}/report.md"


def write_provenance(context: RoundContext) -> None:
    """Keep the resolved round, the versions and the code's git revision beside the results, as round.yaml."""
    facts = {
        "round": context.config.model_dump(mode="json"),
        "versions": context.versions,
        "target_revision": context.target.revision,
        "keys": dict(context.keys.items()),
        "code": code_revision(),
    }
    context.rounds.write_provenance(facts)


def code_revision() -> str:
    """The checkout's git commit, or why there is none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "not a git checkout"
    return done.stdout.strip()


def learn_from(context: RoundContext, report: Report, ledger: Ledger) -> None:
    """Remember this machine's speeds, when this run did every step, the whole of it, and at the first attempt.

    A server that was started anew within a step spoils nothing: its start is taken off.
    """
    seconds = {item.step: item.seconds for item in report.steps if not (item.reused or item.resumed or item.retried)}
    needed = ("generate", "extract", "train", "evaluate")
    if any(name not in seconds for name in needed) or not ledger.starts or report.training.resumed:
        return
    start = sum(ledger.starts) / len(ledger.starts)
    tokens, answers = report.counts["tokens"], report.counts["supervised_tokens"]
    asked = answers * asked_answers(context.config)
    served = sum(item.draft.output_tokens + item.plain.output_tokens for item in report.evaluation.measured)

    def rate(amount: float, step: str, without: float) -> float:
        return amount / max(1.0, seconds[step] - without)

    learn(
        context,
        Rates(
            start_seconds=start,
            generate_tokens=rate(asked, "generate", start + ledger.restarts["generate"]),
            extract_tokens=rate(tokens, "extract", 0.5 * start + ledger.restarts["extract"]),
            train_tokens=rate(report.training.tokens, "train", 20),
            serve_tokens=rate(served, "evaluate", STARTS[report.evaluation.layout] * start),
            answer_tokens=answers / report.counts["samples"],
            origin="measured here in an earlier round",
        ),
    )
