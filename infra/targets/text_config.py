"""The text part of a target's ``config.json``, with the values that it leaves to its library's defaults."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.config.json_file import read_json
from infra.errors import ConfigError

NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
"""Where models of several kinds of input keep their language model's config: transformers' name and older ones."""


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model within a ``config.json``; a part that is null or empty counts as none."""
    for name in NESTED:
        part = raw.get(name)
        if isinstance(part, Mapping) and part:
            return text_part(part)
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
