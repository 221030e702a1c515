"""Flow ``cleanup``: lists, and when asked deletes, what the retention policy of each round allows."""

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact

from infra.config.load import ROUNDS, load_round
from infra.config.settings import Settings
from infra.steps.plan import gib
from infra.steps.retention import removable_everywhere, remove
from infra.store.objects import ObjectStore
from tasks.credentials import use_store_credentials


@flow(name="cleanup", persist_result=False)
def cleanup(dry_run: bool = True) -> None:
    """Free hidden states that can be made again.

    Args:
        dry_run: Only list what would go and why.
    """
    settings = Settings()
    use_store_credentials(settings)
    store = ObjectStore(settings.store)
    configs = [load_round(path) for path in sorted(ROUNDS.glob("*.yaml"))]
    found = removable_everywhere(store, {config.name: config.retention for config in configs})
    create_table_artifact(
        key="cleanup",
        table=[{"what": item.path, "size": gib(item.size), "why": item.why} for item in found],
        description="Would be deleted" if dry_run else "Deleted",
    )
    for item in found:
        get_run_logger().info(f"{'would free' if dry_run else 'freeing'} {gib(item.size)}: {item.path} ({item.why})")
    if not dry_run:
        remove(store, found)
