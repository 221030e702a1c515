"""Flow ``cleanup``: lists, or deletes, what dead runs left and what each round's retention policy allows."""

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact

from infra.config.load import ROUNDS, load_round
from infra.config.settings import Settings
from infra.disk.leftovers import clean, survey
from infra.disk.retention import policies
from infra.progress import gib
from infra.store.objects import ObjectStore
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
    found = (survey if dry_run else clean)(store, settings, known)
    create_table_artifact(
        key="cleanup",
        table=[{"what": item.path, "size": gib(item.size), "why": item.why} for item in found.go],
        description="Would be deleted" if dry_run else "Deleted",
    )
    create_table_artifact(
        key="kept",
        table=[{"what": item.path, "size": gib(item.size), "why": item.why} for item in found.stay],
        description="Kept",
    )
    verb = "would free" if dry_run else "freed"
    for item in found.go:
        get_run_logger().info(f"{verb} {gib(item.size)}: {item.path} ({item.why})")
