"""GPUs: one round at a time, and only on GPUs that are really free."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect import get_run_logger, task
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.events import emit_event

from infra.errors import PreflightError
from infra.machine.gpus.policy import Act
from infra.round.context import RoundContext
from infra.round.gpus import clear_gpus, gpus_wanted, split_by_hand, use_gpus
from infra.round.ledger import Ledger
from tasks.options import STEP

GPU_SLOT = "gpu"


@contextmanager
def gpus_of(context: RoundContext, ledger: Ledger) -> Iterator[None]:
    """The machine's GPUs for a round that wants any: a slot in Prefect, then a look at the GPUs themselves.

    Raises:
        PreflightError: the server has no such slot, or too few GPUs are fit.
    """
    with gpu_slot(context):
        if gpus_wanted(context.config):
            with ledger.step("gpus"):
                ledger.notes += ready_gpus(context)
        yield


@contextmanager
def gpu_slot(*rounds: RoundContext) -> Iterator[None]:
    """The slot in Prefect, if any of these rounds wants GPUs; whether they are free is for :func:`ready_gpus` to see.

    Raises:
        PreflightError: the server has no such slot.
    """
    with ExitStack() as held:
        if any(gpus_wanted(context.config) for context in rounds):
            _take_slot(held)
        yield


def _take_slot(held: ExitStack) -> None:
    """Wait for the slot and keep it until ``held`` is closed, even while the server cannot be told so."""
    get_run_logger().info("waiting for the GPU slot")
    slot = concurrency(GPU_SLOT, occupy=1, strict=True, raise_on_lease_renewal_failure=False)
    try:
        held.enter_context(slot)
    except ConcurrencySlotAcquisitionError as error:
        raise PreflightError(
            f"the GPU slot cannot be taken: {error}",
            expected=f"a concurrency limit `{GPU_SLOT}` on the Prefect server, so that rounds do not share GPUs",
            fix=f"`eagle3 up`, or `prefect gcl create {GPU_SLOT} --limit 1`",
        ) from error


@task(task_run_name="gpus for {context.config.name}", **STEP)
def ready_gpus(context: RoundContext) -> list[str]:
    """Get the round's GPUs free, as its policy allows; what was done, for the report.

    Raises:
        PreflightError: too few are fit.
    """
    if split_by_hand():
        get_run_logger().info("CUDA_VISIBLE_DEVICES names MIG instances: they are used as they are")
        return []
    cleared = clear_gpus(context.config, context.settings)
    for act in cleared.acts:
        _tell(context, act)
    use_gpus(context, cleared)
    return [act.text for act in cleared.acts]


def _tell(context: RoundContext, act: Act) -> None:
    """One event an act: ``eagle3.gpu.ended``, ``eagle3.gpu.reset``, ``eagle3.gpu.quarantined`` and so on."""
    machine = socket.gethostname()
    emit_event(
        event=f"eagle3.gpu.{act.action}",
        resource={"prefect.resource.id": f"eagle3.machine.{machine}", "prefect.resource.name": machine},
        payload={"round": context.config.name, "gpus": list(act.gpus), "text": act.text},
    )
