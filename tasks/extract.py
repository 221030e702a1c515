"""Extract and verify: hidden states of every sample, one task a shard."""

from prefect import task

from infra.errors import GateError
from infra.round.context import RoundContext
from infra.round.ledger import Ledger, Step
from infra.round.serving import Serving
from infra.round.states import discard_shard, faulty_shards, make_live, quarantined_samples, shards_of
from infra.round.survival import survive
from infra.steps import extract as steps
from infra.store.hidden import ShardPlan
from tasks.options import DELAYS, RETRIES, STEP, attempts, may_pass
from tasks.progress import ProgressArtifact


@task(task_run_name="extract", retries=RETRIES, retry_delay_seconds=DELAYS, retry_condition_fn=may_pass, **STEP)
def extract(context: RoundContext, server: Serving, ledger: Ledger, step: Step) -> None:
    """Bring every shard to its manifest; shards that verify are left alone.

    A server that dies or hangs is started anew here, and the shard in hand done again; a retry of the task starts a
    fresh server, too.
    """
    ledger.notes += attempts()
    faults = faulty_shards(context, deep=False)
    total = len(shards_of(context))
    step.came_to(
        whole=not faults, part=len(faults) < total, detail=f"{total - len(faults)} of {total} shards were there"
    )
    if not faults:
        server.stop()
        return
    for plan in faults:
        discard_shard(context, plan)
    _extract_all(context, server, list(faults), total)
    ledger.started(server)
    server.stop()


def _extract_all(context: RoundContext, server: Serving, todo: list[ShardPlan], total: int) -> None:
    """The shards of ``todo``, on as many servers as it takes."""
    config = context.config.extract
    progress = ProgressArtifact("extract", "hidden states", server.log_tail)
    earlier = len(quarantined_samples(context))
    for attempt in survive(server, len(context.samples), config.max_quarantined, earlier):
        steps.wait_for_room(context, todo[0])  # what an engine dies of may be a full disk
        with attempt:
            extractor = server.extractor(config.timeout_seconds)
            for sample in attempt.suspects():
                steps.try_sample(context, extractor, server.flights, sample)
            discard_shard(context, todo[0])
            with steps.Extraction(
                context, extractor, server.flights, todo, attempt.quarantined, progress
            ) as extraction:
                while todo:
                    extract_shard(extraction, todo[0], total)
                    del todo[0]


@task(task_run_name="extract shard {plan.number} of {total}: rows {plan.first_row} to {plan.end_row}", **STEP)
def extract_shard(extraction: steps.Extraction, plan: ShardPlan, total: int) -> None:
    """One shard to its manifest, the engine already working on the next."""
    extraction.shard(plan)


@task(task_run_name="verify", **STEP)
def verify(context: RoundContext, step: Step) -> None:
    """Read every shard back with its checksums; the pointer to this generation is written only now.

    Raises:
        GateError: a shard does not verify; it is deleted, so that the next run does it again.
    """
    faults = faulty_shards(context, deep=True)
    for plan in faults:
        discard_shard(context, plan)
    if faults:
        raise GateError(
            "capture",
            f"{len(faults)} shards do not verify: " + "; ".join(list(faults.values())[:3]),
            fix="start the round again: only these shards are done again",
        )
    make_live(context)
    step.detail = f"{len(shards_of(context))} shards by checksum"
    if quarantined := [sample.sample_id for sample in quarantined_samples(context)]:
        step.detail += f"; without states, for the engine dies on them: {', '.join(quarantined)}"
