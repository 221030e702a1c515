"""Extract and verify: hidden states of every sample, one task a shard."""

from prefect import get_run_logger, task

from infra.engines.client.extraction import Extractor
from infra.errors import GateError
from infra.gates.convention import convention_if_done
from infra.round.context import Round
from infra.round.ledger import Ledger, Step, done_steps
from infra.round.serving import Serving
from infra.round.survival import Survival
from infra.steps import extract as steps
from infra.store.hidden import ShardPlan
from tasks.notices import announce
from tasks.options import DELAYS, RETRIES, STEP, attempts, may_pass
from tasks.progress import ProgressArtifact


def extraction_is_due(round_: Round) -> bool:
    """Whether hidden states of this key are missing as far as can be told before the samples are read."""
    return "hidden" not in done_steps(round_)


def engine_may_load(round_: Round) -> bool:
    """Whether the extracting engine may load while other things are done.

    On GPUs not beside the convention gate's reference, which takes room of its own there: an engine that sizes its
    cache meanwhile gets the rest, or fails, and another rung would be remembered for it.
    """
    on_gpus, reference = round_.extracting.device == "cuda", round_.config.gates.convention.reference
    done = convention_if_done(round_)
    return not on_gpus or reference == "none" or (done is not None and bool(done.reference))


@task(task_run_name="extract", retries=RETRIES, retry_delay_seconds=DELAYS, retry_condition_fn=may_pass, **STEP)
def extract(round_: Round, server: Serving, ledger: Ledger, step: Step) -> None:
    """Bring every shard to its manifest; shards that verify are left alone.

    A server that dies or hangs is started anew here, and the shard in hand done again; a retry of the task starts a
    fresh server, too.
    """
    ledger.notes += attempts()
    faults = steps.faulty_shards(round_, deep=False)
    total = len(steps.shards_of(round_))
    step.came_to(
        whole=not faults, part=len(faults) < total, detail=f"{total - len(faults)} of {total} shards were there"
    )
    if not faults:
        server.stop()
        return
    for plan in faults:
        steps.discard_shard(round_, plan)
    _extract_all(round_, server, list(faults), total)
    ledger.started(server)
    server.stop()


def _extract_all(round_: Round, server: Serving, todo: list[ShardPlan], total: int) -> None:
    """The shards of ``todo``, on as many servers as it takes."""
    config, log = round_.config.extract, get_run_logger()
    progress = ProgressArtifact("extract", "hidden states", server.log_tail)
    earlier = len(steps.quarantined_samples(round_))
    survival = Survival(server, len(round_.samples), config.max_quarantined, earlier)
    server.on_notice = announce

    def connect() -> Extractor:
        steps.wait_for_room(round_, todo[0])  # what an engine dies of may be a full disk
        return server.extractor(config.timeout_seconds, log.info)

    def work(extractor: Extractor) -> None:
        steps.discard_shard(round_, todo[0])
        with steps.Extraction(round_, extractor, server.flights, todo, survival.quarantined, progress) as extraction:
            while todo:
                extract_shard(extraction, todo[0], total)
                del todo[0]

    survival.run(
        connect=connect,
        trial=lambda extractor, sample: steps.try_sample(round_, extractor, server.flights, sample),
        work=work,
    )


@task(task_run_name="extract shard {plan.number} of {total}: rows {plan.first_row} to {plan.end_row}", **STEP)
def extract_shard(extraction: steps.Extraction, plan: ShardPlan, total: int) -> None:
    """One shard to its manifest, the engine already working on the next."""
    extraction.shard(plan)


@task(task_run_name="verify", **STEP)
def verify(round_: Round, step: Step) -> None:
    """Read every shard back with its checksums; the pointer to this generation is written only now.

    Raises:
        GateError: a shard does not verify; it is deleted, so that the next run does it again.
    """
    faults = steps.faulty_shards(round_, deep=True)
    for plan in faults:
        steps.discard_shard(round_, plan)
    if faults:
        raise GateError(
            "capture",
            f"{len(faults)} shards do not verify: " + "; ".join(list(faults.values())[:3]),
            fix="start the round again: only these shards are done again",
        )
    steps.make_live(round_)
    step.detail = f"{len(steps.shards_of(round_))} shards by checksum"
    if quarantined := [sample.sample_id for sample in steps.quarantined_samples(round_)]:
        step.detail += f"; without states, for the engine dies on them: {', '.join(quarantined)}"
