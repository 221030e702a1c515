"""``eagle3 clean``: what could be deleted and why, what is kept and why; and deleting it."""

from dataclasses import asdict
from typing import Annotated

import typer

from deployments.cli.output import Json, print_json, print_table, size
from deployments.cli.rounds import rounds_folder
from infra.config.settings import Settings

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list what would go and what would stay.")]


def clean(dry_run: DryRun = False, as_json: Json = False) -> None:
    """Delete what dead runs left and what each round's retention policy lets go; nothing that cannot be made again."""
    from infra.config.load import load_round
    from infra.disk import leftovers
    from infra.disk.retention import policies
    from infra.store.objects import ObjectStore

    settings = Settings()
    store = ObjectStore(settings.store)
    known = policies(store, map(load_round, sorted(rounds_folder().glob("*.yaml"))))
    found = (leftovers.survey if dry_run else leftovers.clean)(store, settings, known)
    freed = sum(item.size for item in found.go)
    if as_json:
        go, stay = [asdict(item) for item in found.go], [asdict(item) for item in found.stay]
        print_json({"dry_run": dry_run, "bytes": freed, "go": go, "stay": stay})
        return
    title = f"would go: {size(freed)}" if dry_run else f"deleted: {size(freed)}"
    print_table(title, ["what", "size", "why"], [(item.path, size(item.size), item.why) for item in found.go])
    print_table("kept", ["what", "size", "why"], [(item.path, size(item.size), item.why) for item in found.stay])
