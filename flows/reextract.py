"""Flow ``reextract``: hidden states that no longer match their target, engine, template or taps are made again.

The new generation lies beside the old one; it is verified before the cleanup policy may take the old.
"""

from pathlib import Path

from prefect import flow, get_run_logger

import tasks
from flows.lifecycle import make_states
from infra.config.load import ROUNDS, load_round, round_file
from infra.config.settings import Settings
from infra.errors import Eagle3Error
from infra.round.context import RoundContext
from infra.round.ledger import Ledger
from infra.round.states import stale
from infra.round.status import look
from tasks.credentials import use_store_credentials

STEPS = ("samples", "hidden")
"""What runs here of a round, and so all that its plan must count."""


@flow(name="reextract", persist_result=False)
def reextract(rounds: list[str] = []) -> None:  # noqa: B006 (Prefect shows the default)
    """Re-extract stale hidden states; a round that cannot be done stops none of the others.

    Args:
        rounds: Names of the rounds to look at; empty means every round in deployments/rounds that has hidden states.
    """
    log = get_run_logger()
    names = rounds or sorted(path.stem for path in ROUNDS.glob("*.yaml"))
    settings = Settings()
    use_store_credentials(settings)
    failed: dict[str, str] = {}
    with tasks.ends_with_its_run():
        for name in names:
            try:
                _look_at(name, settings)
            except Exception as error:
                label = Path(name).stem
                log.error(f"{label}: {error}")
                failed[label] = error.what if isinstance(error, Eagle3Error) else f"{type(error).__name__}: {error}"
    if failed:
        raise Eagle3Error(
            "not re-extracted: " + "; ".join(f"{name}: {why}" for name, why in failed.items()),
            fix="see what this run's log says of each; what is done stays done",
        )


def _look_at(name: str, settings: Settings) -> None:
    """Extract a round's states again if they are stale; one that cannot be looked at here is said and passed over."""
    log = get_run_logger()
    config = load_round(round_file(name))
    try:
        context, why = stale(config, settings)
    except Eagle3Error as error:
        log.info(f"{config.name}: cannot be looked at here: {error}")
        return
    if context is None:
        log.info(f"{config.name}: {why}")
        return
    log.info(f"{config.name}: {why}; extracting generation {context.keys.hidden} beside the old")
    with context.lock():
        _again(context)


def _again(context: RoundContext) -> None:
    ledger = Ledger()
    tasks.watch_disk(context, ledger)
    with ledger.step("preflight"):
        tasks.preflight(context, tasks.plan(context, only=STEPS))
    with tasks.gpus_of(context, ledger):
        make_states(context, look(context), ledger)
    with ledger.step("cleanup"):
        tasks.cleanup_before_training(context)
