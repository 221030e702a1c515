"""Walking the chain: what serving will accept, predicted from stored held-out states.

Serving drafts a chain wherever the last one ended, so its starts are not spread evenly over the answer: after a long
accepted run comes a harder position than the average one. The walk starts where serving starts and moves as it moves.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infra.drafter.acceptance import ChainCounts, pooled
from infra.errors import TrainingError
from infra.machine.logtail import last_lines
from infra.machine.processes.guarded import Guarded, Spec, clean_environment, forward_environment
from infra.store.objects import store_environment
from infra.store.samples import Sample


@dataclass(frozen=True)
class Steps:
    """Counts by draft step over all positions of an answer.

    Args:
        positions: positions that have a token to be compared with.
        joint: of these, where this and all earlier drafts are right.
        reached: of these, where all earlier drafts are right.
    """

    positions: tuple[int, ...]
    joint: tuple[int, ...]
    reached: tuple[int, ...]


@dataclass(frozen=True)
class WalkedSample:
    """One held-out sample: the chain's counts, the counts over all positions, and what each position would get.

    Args:
        accepted: see :func:`accepted_from`.
    """

    row: int
    sample_id: str
    chain: ChainCounts
    steps: Steps
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class WalkResult:
    """A walk over held-out samples."""

    samples: tuple[WalkedSample, ...]

    @property
    def predicted(self) -> ChainCounts:
        """Acceptance that serving should show on these prompts."""
        return pooled([sample.chain for sample in self.samples])

    @property
    def parts(self) -> list[ChainCounts]:
        """Counts by sample, for :func:`infra.drafter.acceptance.bootstrap`."""
        return [sample.chain for sample in self.samples]

    @property
    def joint(self) -> tuple[float, ...]:
        """By draft step: share of all positions where this and all earlier drafts are right."""
        return self._ratio("joint", "positions")

    @property
    def conditional(self) -> tuple[float, ...]:
        """By draft step: share of the positions with all earlier drafts right where this one is, too."""
        return self._ratio("joint", "reached")

    def _ratio(self, above: str, below: str) -> tuple[float, ...]:
        """Quotients by draft step; 0 where nothing was counted."""
        tops = np.sum([getattr(sample.steps, above) for sample in self.samples], axis=0)
        bottoms = np.sum([getattr(sample.steps, below) for sample in self.samples], axis=0)
        return tuple(float(top) / float(bottom) if bottom else 0.0 for top, bottom in zip(tops, bottoms, strict=True))


def accepted_from(correct: NDArray[np.bool_], first: int, end: int) -> list[int]:
    """How many drafts a chain would get accepted from each place of an answer where serving can start one.

    Entry n is the chain that starts when n + 1 tokens of the answer are known. Its last known state is at position
    first - 1 + n.

    Args:
        correct: bool [steps, positions]: whether draft k of a chain whose last known state is position i is the
            token i + 2 + k.
        first: index of the answer's first token, which comes from the target alone.
        end: index after the answer's last token; what was drafted beyond it counts as not accepted.
    """
    runs = np.logical_and.accumulate(correct[:, first - 1 : max(first - 1, end - 2)], axis=0).sum(axis=0)
    left = end - first - 1 - np.arange(len(runs))
    return [int(run) for run in np.minimum(runs, left)]


def walk_chain(accepted: Sequence[int], drafts: int) -> ChainCounts:
    """Walk one answer as serving would, greedily: each chain starts behind what the last one got accepted.

    Args:
        accepted: what :func:`accepted_from` found.
        drafts: tokens drafted a step.
    """
    by_position = [0] * drafts
    starts = known = 0
    while known < len(accepted):
        starts += 1
        for place in range(accepted[known]):
            by_position[place] += 1
        known += accepted[known] + 1
    return ChainCounts(starts, tuple(by_position))


def count_steps(correct: NDArray[np.bool_], first: int, end: int) -> Steps:
    """Counts over every position of one answer; arguments as for :func:`accepted_from`."""
    positions, joint, reached = [], [], []
    for step in range(correct.shape[0]):
        span = slice(first - 1, max(first - 1, end - 2 - step))
        right = correct[: step + 1, span].all(axis=0)
        positions.append(right.size)
        joint.append(int(right.sum()))
        reached.append(int(correct[:step, span].all(axis=0).sum()) if step else right.size)
    return Steps(tuple(positions), tuple(joint), tuple(reached))


def walk(
    draft: Path,
    samples: Sequence[Sample],
    *,
    states_url: str,
    states_prefix: str,
    drafts: int,
    workdir: Path,
    run_dir: Path,
    timeout: float = 3600.0,
) -> WalkResult:
    """Walk the chain over stored states of ``samples``, in a process of its own, one sample in memory at a time.

    Args:
        draft: a checkpoint or published folder.
        samples: samples whose rows are in the store; the target's own greedy answers.
        drafts: tokens drafted a step.
        workdir: folder for the request, the answer and the log.
        timeout: longest wait, seconds.

    Raises:
        TrainingError: there is nothing to walk, or the process failed.
    """
    spans = [(sample, *answer_span(sample)) for sample in samples]
    asked = [
        {"row": sample.row, "first": first, "end": end}
        for sample, first, end in spans
        if end - first >= 2 and first >= 1
    ]
    if not asked:
        raise TrainingError(
            "no held-out sample has an answer of two tokens or more", expected="held-out answers to walk over"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    request, answer = workdir / "walk-request.json", workdir / "walk.jsonl"
    answer.unlink(missing_ok=True)
    question = {"draft": str(draft), "url": states_url, "prefix": states_prefix, "drafts": drafts, "rows": asked}
    request.write_text(json.dumps(question))
    spec = Spec(
        command=(sys.executable, "-m", "infra.drafter.walk_entry", str(request), str(answer)),
        purpose="walk the chain",
        log=workdir / "walk.log",
        env=clean_environment(forward_environment() | store_environment(states_url)),
        cwd=workdir,
    )
    with Guarded.start(spec, run_dir) as process:
        status = process.wait(timeout=timeout)
    if status != 0:
        tail = last_lines(spec.log, 15) or "its log is empty"
        found = "took too long" if status is None else f"ended with status {status}"
        raise TrainingError(f"walking the chain {found}: {tail}", fix=f"read {spec.log}")
    ids = {sample.row: sample.sample_id for sample in samples}
    walked = [json.loads(line) for line in answer.read_text().splitlines()]
    if [item["row"] for item in walked] != [item["row"] for item in asked]:
        raise TrainingError(f"{len(walked)} of {len(asked)} held-out samples were walked", fix=f"read {spec.log}")
    return WalkResult(tuple(_walked(item, ids[item["row"]]) for item in walked))


def answer_span(sample: Sample) -> tuple[int, int]:
    """Where a sample's answer begins, and the index after its last token; (0, 0) if it has none."""
    written = [index for index, mask in enumerate(sample.loss_mask) if mask]
    return (written[0], written[-1] + 1) if written else (0, 0)


def _walked(item: dict[str, list[int]], sample_id: str) -> WalkedSample:
    chain = ChainCounts(int(item["starts"]), tuple(item["accepted"]))  # type: ignore[call-overload]
    steps = Steps(tuple(item["positions"]), tuple(item["joint"]), tuple(item["reached"]))
    row = int(item["row"])  # type: ignore[call-overload]
    return WalkedSample(row, sample_id, chain, steps, tuple(item["accepted_from"]))
