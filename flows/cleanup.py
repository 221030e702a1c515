"""Flow ``cleanup``: lists, or deletes, what dead runs left and what each round's retention policy allows."""

from collections.abc import Iterable

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact

from infra.config.load import ROUNDS, load_round
from infra.config.settings import Settings
from infra.disk.candidates import clean, survey
from infra.disk.item import Item
from infra.disk.retention import policies
from infra.store.objects import ObjectStore
from infra.units import size
from tasks.credentials import use_store_credentials


@flow(name="cleanup", persist_result=False)
def cleanup(dry_run: bool = True) -> None:
    """Free what can be made again: half-written files, leftovers in scratch and shared memory, hidden states.

    Args:
        dry_run: Only list what would go and why, and what is kept and why.
    """
    settings = Settings()
    use_store_credentials(settings)
    store = ObjectStore(settings.store)
    known = policies(store, map(load_round, sorted(ROUNDS.glob("*.yaml"))))
    items = (survey if dry_run else clean)(store, settings, known)
    going = [item for item in items if item.may_go]
    create_table_artifact(
        key="cleanup",
        table=_table(going),
        description="Would be deleted" if dry_run else "Deleted",
    )
    create_table_artifact(
        key="kept",
        table=_table(item for item in items if not item.may_go),
        description="Kept",
    )
    verb = "would free" if dry_run else "freed"
    for item in going:
        get_run_logger().info(f"{verb} {size(item.bytes)}: {item.path} ({item.why})")


def _table(items: Iterable[Item]) -> list[dict[str, str]]:
    return [{"what": item.path, "size": size(item.bytes), "why": item.why} for item in items]
