"""The language model in a target's ``config.json``, with the values that the file leaves to its library's defaults.

transformers takes seconds to import, so it is imported by what needs it. :func:`open_text` runs no code of the target.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.config.json_file import read_json
from infra.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
"""Where models of several kinds of input keep their language model's config: transformers' name and older ones."""
SAME_CODE = {"kimi_k2": "deepseek_v3"}
"""Families whose config and weights are those of another one that transformers knows."""


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model within a ``config.json``; a part that is null or empty counts as none.

    Raises:
        ConfigError: such a part is no JSON object.
    """
    for name in NESTED:
        part = raw.get(name)
        if isinstance(part, Mapping) and part:
            return text_part(part)
        if part:
            raise ConfigError(f"config.json has a {name} that is no JSON object: {part!r:.60}")
    return raw


def text_fields(folder: Path, names: Sequence[str], trust_remote_code: bool = False) -> dict[str, Any]:
    """Fields of the text part; what is not written there has the value that transformers' config class gives it.

    Args:
        folder: the target's folder.
        names: the fields, as transformers names them.
        trust_remote_code: whether a config that comes as code may run.

    Raises:
        ConfigError: config.json is damaged, or a field is not written and no class is known that has it.
    """
    path = folder / "config.json"
    raw = read_json(path)
    text = text_part(raw)
    if all(text.get(name) is not None for name in names):
        return {name: text[name] for name in names}
    config = _opened(folder, raw, text, trust_remote_code)
    if config is None or getattr(config, "is_encoder_decoder", False):
        missing = next(name for name in names if text.get(name) is None)
        known = "" if config is not None else f", and transformers has no config class for {_family(raw)}"
        raise ConfigError(f"{path} has no {missing!r}{known}", expected="a decoder-only language model")
    fields = {name: text.get(name, getattr(config, name, None)) for name in names}
    if lacking := [name for name in names if fields[name] is None]:
        raise ConfigError(
            f"{path} has no {lacking[0]!r}, and the config class of {_family(raw)} gives it no value",
            expected="a decoder-only language model",
        )
    return fields


def _opened(folder: Path, raw: Mapping[str, Any], text: Mapping[str, Any], trust_remote_code: bool) -> Any:
    """The text part as transformers opens it; None where it knows neither the whole nor the part."""
    from transformers import AutoConfig, PretrainedConfig

    try:
        if "model_type" not in raw:
            # transformers would guess it from the folder's name.
            return None if "model_type" not in text else AutoConfig.for_model(**text)
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        part = whole.get_text_config(decoder=True)
        return part if isinstance(part, PretrainedConfig) else whole
    except Exception as error:  # config classes, and code that a target brings, raise whatever comes
        if text is raw or "model_type" not in text:
            if "does not recognize this architecture" in str(error) or "model_type" not in raw:
                return None
            said = " ".join(str(error).split())
            if "trust_remote_code" in said:
                raise ConfigError(
                    f"{folder / 'config.json'} leaves values to Python code that comes with it",
                    fix="read that code and, if you trust it, set target.trust_remote_code: true",
                ) from error
            raise ConfigError(f"transformers cannot open {folder / 'config.json'}: {said:.300}") from error
    try:
        return AutoConfig.for_model(**text)
    except Exception:  # as above
        return None


def _family(raw: Mapping[str, Any]) -> str:
    return f"model_type {raw['model_type']!r}" if "model_type" in raw else "a config without model_type"


def outer_family(folder: Path) -> str:
    """``model_type`` of the whole target, which holds the language model; "" where the language model is all of it."""
    config = read_json(folder / "config.json")
    part = text_part(config)
    return "" if part == config else str(config.get("model_type", ""))


def open_text(folder: Path) -> "PretrainedConfig":
    """The config of the target's language model, of a class that transformers has.

    Raises:
        ConfigError: transformers has no class for it, or the class refuses its values.
    """
    from transformers import CONFIG_MAPPING

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
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _known(fields: Mapping[str, Any]) -> str | None:
    from transformers import CONFIG_MAPPING

    family = str(fields.get("model_type"))
    family = SAME_CODE.get(family, family)
    return family if family in CONFIG_MAPPING else None
