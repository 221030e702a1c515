"""One draft served right and with a fault: predicted, served, step by step, and what the serving gate says."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.drafter.acceptance import ChainCounts, serving_gate
from infra.drafter.walk import WalkResult, answer_span, walk
from infra.engines.client.bench import run, summary
from infra.engines.client.client import Sampling
from infra.errors import GateError
from infra.results import Paired
from infra.round.context import RoundContext
from infra.round.draft_layouts import served_draft
from infra.round.serving import Serving
from infra.steps.evaluate import pair_runs
from infra.store.samples import Sample

FEW = 4
COLUMNS = (
    "draft",
    "prompts",
    "predicted",
    "served",
    "a step",
    "interval",
    "as predicted",
    "steps",
    "shared",
    "verdict",
)


@dataclass(frozen=True)
class Contrast:
    """One draft on one group of prompts."""

    draft: str
    prompts: str
    predicted: ChainCounts
    served: ChainCounts
    paired: Paired
    stopped: str

    @property
    def row(self) -> tuple[str, ...]:
        """Its cells under :data:`COLUMNS`."""
        paired, (low, high) = self.paired, self.paired.differing_interval
        return (
            self.draft, self.prompts, f"{self.predicted.length:.3f}", f"{self.served.length:.3f}",
            f"{paired.difference:+.4f}", f"{paired.differing:.1%}", f"{low:.1%} to {high:.1%}", f"{paired.active}",
            f"{paired.steps}", f"{paired.shared:.0%}", "stops" if self.stopped else paired.why_not or "passes",
        )  # fmt: skip


def contrast(
    context: RoundContext, draft: Path, served: Mapping[str, Path], groups: Mapping[str, Sequence[Sample]], work: Path
) -> Iterator[Contrast]:
    """Walk the draft over the stored states of each group, then serve each variant of it.

    Args:
        context: a round whose states are in the store.
        draft: as it was trained.
        served: variants of the draft by name.
        groups: samples by name.
        work: a folder for files.
    """
    walks = {name: _walk(context, draft, samples, work / name) for name, samples in groups.items()}
    for variant, folder in served.items():
        with Serving(context, "bench", draft=served_draft(context, folder)) as serving:
            client = serving.ready(600)
            for name, samples in groups.items():
                prompts = [sample.input_ids[: answer_span(sample)[0]] for sample in samples]
                sampling = Sampling(context.config.generate.max_tokens)
                done = run(client, prompts, sampling=sampling, concurrency=FEW)
                paired = pair_runs(context, samples, walks[name], [done])
                counters = summary([done]).counters
                assert counters is not None
                live = ChainCounts(counters.drafts, counters.accepted_per_position)
                yield Contrast(variant, name, walks[name].predicted, live, paired, _stopped(walks[name], live, paired))


def _walk(context: RoundContext, draft: Path, samples: Sequence[Sample], work: Path) -> WalkResult:
    return walk(
        draft,
        samples,
        states_url=context.settings.store,
        states_prefix=context.prefix("hidden"),
        drafts=context.config.evaluate.drafts,
        workdir=work,
        run_dir=context.settings.run_dir,
    )


def _stopped(walked: WalkResult, live: ChainCounts, paired: Paired) -> str:
    try:
        serving_gate(walked.predicted, live, 0.05, paired)
    except GateError as error:
        return str(error)
    return ""
