"""Reading a round from YAML and merging overrides into it."""

import copy
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from infra.config.round import RoundConfig
from infra.errors import ConfigError

ROUNDS = Path(__file__).resolve().parents[2] / "deployments" / "rounds"


def round_file(name: str, folder: Path = ROUNDS) -> Path:
    """Path of a round's YAML file; ``name`` is a round's name or a path.

    Raises:
        ConfigError: there is no such round.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(item.stem for item in folder.glob("*.yaml"))
        raise ConfigError(f"there is no round {name!r}", expected=f"one of {known} or the path of a YAML file")
    return path


def load_round(path: Path, overrides: Mapping[str, Any] | None = None) -> RoundConfig:
    """The round in a YAML file, with dotted overrides merged in.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or the round is not valid; every fault is named.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not YAML: {error}", expected="YAML in UTF-8") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path.name} holds {type(raw).__name__}", expected="a mapping of round fields")
    return build_round(raw, overrides, origin=path.name)


def build_round(
    raw: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, origin: str = "round"
) -> RoundConfig:
    """A validated round from plain data; ``overrides`` maps dotted keys to values (``{"train.epochs": 2}``).

    Raises:
        ConfigError: an override names no field, or the result is not valid.
    """
    merged: Any = copy.deepcopy(dict(raw))
    for dotted, value in (overrides or {}).items():
        *parents, last = dotted.split(".")
        node = merged
        for part in parents:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
            if not isinstance(node, dict):
                raise ConfigError(f"override {dotted!r} goes through {part!r}, which is not a group of fields")
        node[last] = value
    try:
        return RoundConfig.model_validate(merged)
    except ValidationError as error:
        changed = f" with {', '.join(overrides)} overridden" if overrides else ""
        faults = "; ".join(_fault(fault) for fault in error.errors())
        raise ConfigError(f"{origin}{changed} is not a valid round: {faults}") from error


def _fault(fault: ErrorDetails) -> str:
    """One fault in a sentence; a field that does not exist, with the one that was probably meant."""
    path = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        near = get_close_matches(path, list(_fields(RoundConfig)), n=1, cutoff=0.8)
        return f"there is no field {path}" + (f" (did you mean {near[0]}?)" if near else "")
    said = fault["msg"].removeprefix("Value error, ")
    return f"{path}: {said}" if path else said


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of the fields, groups included."""
    for name, field in model.model_fields.items():
        yield prefix + (field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, f"{prefix}{name}.")
