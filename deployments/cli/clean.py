"""``eagle3 clean``: what could be deleted and why, what is kept and why; and deleting it."""

from dataclasses import asdict
from typing import Annotated

import typer

from deployments.cli.output import Json, print_json, print_table
from deployments.cli.rounds import rounds_folder
from infra.config.settings import Settings
from infra.units import size

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list what would go and what would stay.")]


def clean(dry_run: DryRun = False, as_json: Json = False) -> None:
    """Delete what dead runs left and what each round's retention policy lets go; nothing that cannot be made again."""
    from infra.config.load import load_round
    from infra.disk.candidates import clean as delete
    from infra.disk.candidates import survey
    from infra.disk.retention import policies
    from infra.store.objects import ObjectStore

    settings = Settings()
    store = ObjectStore(settings.store)
    known = policies(store, map(load_round, sorted(rounds_folder().glob("*.yaml"))))
    items = (survey if dry_run else delete)(store, settings, known)
    go, stay = ([item for item in items if item.may_go is wanted] for wanted in (True, False))
    freed = sum(item.bytes for item in go)
    if as_json:
        print_json({"dry_run": dry_run, "bytes": freed, "go": list(map(asdict, go)), "stay": list(map(asdict, stay))})
        return
    title = f"would go: {size(freed)}" if dry_run else f"deleted: {size(freed)}"
    print_table(title, ["what", "size", "why"], [(item.path, size(item.bytes), item.why) for item in go])
    print_table("kept", ["what", "size", "why"], [(item.path, size(item.bytes), item.why) for item in stay])
