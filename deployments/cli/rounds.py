"""Rounds as the command line names them: ``smoke``, a path, ``--set train.epochs=2``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from infra.config.round import RoundConfig
from infra.errors import ConfigError

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the round, e.g. `--set train.epochs=2`."),
]


def parse_overrides(pairs: Sequence[str] | None) -> dict[str, Any]:
    """``["train.epochs=2"]`` -> ``{"train.epochs": 2}``; values are YAML.

    Raises:
        ConfigError: one is not ``key=value``.
    """
    result: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {pair!r} cannot be read", expected="KEY=VALUE, e.g. train.epochs=2")
        try:
            result[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"the value of --set {pair!r} is not YAML", expected="a number, word, list or mapping"
            ) from error
    return result


def rounds_folder() -> Path:
    """Folder of the round files in the checkout."""
    from deployments.environment import checkout

    return checkout() / "deployments" / "rounds"


def open_round(name: str, overrides: Sequence[str] | None = None) -> RoundConfig:
    """The validated round of this name or path.

    Raises:
        ConfigError: there is none, or it is not valid.
    """
    from infra.config.load import load_round, round_file

    return load_round(round_file(name, rounds_folder()), parse_overrides(overrides))


def open_deployed(name: str, overrides: Sequence[str] | None = None) -> RoundConfig:
    """As :func:`open_round`, for what is started as a deployment: the server knows the rounds of the checkout only.

    Raises:
        ConfigError: it is none of them, too; another file of the same name would not be what runs.
    """
    from infra.config.load import round_file

    folder, path = rounds_folder(), round_file(name, rounds_folder())
    if path.resolve().parent != folder.resolve():
        raise ConfigError(
            f"{path} is not among the rounds that are deployed",
            expected=f"a file in {folder}",
            fix="copy it there under its round's name (then `eagle3 deploy`), or change single fields with --set",
        )
    return open_round(name, overrides)
