"""``eagle3 target``: fetch and list the models that are served."""

from typing import Annotated, Any

import typer

from deployments.cli.output import Json, print_json, print_table
from deployments.cli.rounds import rounds_folder
from infra.config.round import TargetConfig
from infra.config.settings import Settings
from infra.errors import ConfigError
from infra.units import size

app = typer.Typer(no_args_is_help=True)


@app.command("fetch")
def fetch(name: Annotated[str, typer.Argument(help="Name of a round or of a target.")], as_json: Json = False) -> None:
    """Fetch a target into the models folder; does nothing if it is already there."""
    from infra.targets.fetch import fetch_target

    settings = Settings()
    path = fetch_target(find_target(name), settings.models_dir, settings.cache_dir)
    if as_json:
        print_json({"name": name, "path": path})
    else:
        print(path)


@app.command("list")
def show(as_json: Json = False) -> None:
    """List the targets that the rounds name, and which of them are here."""
    settings = Settings()
    items = [_facts(config, rounds, settings) for config, rounds in known_targets()]
    if as_json:
        print_json(items)
        return
    rows = [
        (
            item["name"],
            "here" if item["here"] else "missing",
            size(item["bytes"]),
            ", ".join(item["rounds"]),
            item["source"],
        )
        for item in items
    ]
    print_table(f"targets in {settings.models_dir}", ["target", "state", "weights", "rounds", "source"], rows)


def known_targets() -> list[tuple[TargetConfig, list[str]]]:
    """Every target of the round files, with the rounds that name it."""
    from infra.config.load import load_round

    found: dict[TargetConfig, list[str]] = {}
    for file in sorted(rounds_folder().glob("*.yaml")):
        config = load_round(file)
        found.setdefault(config.target, []).append(config.name)
    return list(found.items())


def find_target(name: str) -> TargetConfig:
    """The target of this name, or of the round of this name.

    Raises:
        ConfigError: no round file names it.
    """
    targets = known_targets()
    for config, rounds in targets:
        if name == config.name or name in rounds:
            return config
    known = sorted({config.name for config, _ in targets} | {item for _, rounds in targets for item in rounds})
    raise ConfigError(f"no round file names a target or round {name!r}", expected=f"one of {known}")


def _facts(config: TargetConfig, rounds: list[str], settings: Settings) -> dict[str, Any]:
    from infra.targets.target import weight_files

    folder = settings.models_dir / config.name
    weights = weight_files(folder)
    return {
        "name": config.name,
        "here": bool(weights) and (folder / "config.json").is_file(),
        "bytes": sum(file.stat().st_size for file in weights),
        "path": folder,
        "source": config.source,
        "rounds": rounds,
    }
