"""The language model in a target's config.json, opened by the class that transformers has for it.

Values that the file leaves to defaults are read as transformers reads them. No code of the target is run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.utils import logging

from infra.config.json_file import read_json
from infra.errors import ConfigError
from infra.targets.text_config import NESTED, text_part

SAME_CODE = {"kimi_k2": "deepseek_v3"}
"""Families whose config and weights are those of another one that transformers knows."""


def outer_family(folder: Path) -> str:
    """``model_type`` of the whole target, which holds the language model; "" where the language model is all of it."""
    config = read_json(folder / "config.json")
    part = text_part(config)
    return "" if part == config else str(config.get("model_type", ""))


def open_text(folder: Path) -> PretrainedConfig:
    """The config of the target's language model, of a class that transformers has.

    Raises:
        ConfigError: transformers has no class for it, or the class refuses its values.
    """
    fields = {name: value for name, value in read_json(folder / "config.json").items() if name not in NESTED or value}
    if _known(fields) is None:
        fields = {"architectures": fields.get("architectures")} | dict(text_part(fields))
    known = _known(fields)
    if known is None:
        raise ConfigError(
            f"transformers has no config class for a {fields.get('model_type')!r} target ({folder / 'config.json'})",
            expected="a family that it knows, without code from the target's folder",
        )
    for name in NESTED:
        if isinstance(part := fields.get(name), dict) and part.get("model_type") in SAME_CODE:
            fields[name] = part | {"model_type": SAME_CODE[part["model_type"]]}
    plain = {name: value for name, value in fields.items() if name not in ("auto_map", "quantization_config")}
    try:
        with _quietly():
            return CONFIG_MAPPING[known].from_dict(plain | {"model_type": known}).get_text_config()
    except Exception as error:  # each class has errors of its own
        raise ConfigError(f"transformers cannot read {folder / 'config.json'}: {error}") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what transformers warns of: it says so wherever the target is loaded, and a plan reads it often."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _known(fields: Mapping[str, Any]) -> str | None:
    family = str(fields.get("model_type"))
    family = SAME_CODE.get(family, family)
    return family if family in CONFIG_MAPPING else None
