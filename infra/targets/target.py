"""What a target's folder says about it: shape, revision, fitness for EAGLE-3."""

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.config.json_file import read_json
from infra.config.round import TargetConfig, TargetShape
from infra.config.sampling import NEUTRAL, SAMPLING
from infra.errors import ConfigError, MissingTarget
from infra.targets.text import text_fields

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tiktoken.model",
)

LONGEST_HEADER = 100_000_000
"""Most bytes of a safetensors header, which is the format's own bound."""


class Target(BaseModel):
    """A target on this machine."""

    model_config = ConfigDict(frozen=True)

    name: str
    path: Path
    shape: TargetShape
    revision: str
    trust_remote_code: bool = False


def open_target(config: TargetConfig, models_dir: Path) -> Target:
    """The target as it lies in ``models_dir/<name>``.

    Raises:
        MissingTarget: the folder is missing, or its weights are or are not whole; the fix names the command that
            fetches it.
        ConfigError: its config.json cannot be used.
    """
    folder = models_dir / config.name
    fix = f"eagle3 target fetch {config.name}" if config.source else f"put the model's files into {folder}"
    if not (folder / "config.json").is_file():
        raise MissingTarget(
            f"target {config.name} is not at {folder}", expected="a folder with config.json and weights", fix=fix
        )
    if not weight_files(folder):
        raise MissingTarget(f"target {config.name} has no *.safetensors in {folder}", fix=fix)
    if (fault := _weights_fault(folder)) is not None:
        raise MissingTarget(
            f"target {config.name} is not whole: {fault}",
            expected="weight files that are complete",
            fix=f"remove it; {fix}",
        )
    return Target(
        name=config.name,
        path=folder,
        shape=read_shape(folder, config.trust_remote_code),
        revision=target_revision(folder),
        trust_remote_code=config.trust_remote_code,
    )


def weight_files(folder: Path) -> list[Path]:
    """The target's weight files, by name."""
    return sorted(folder.glob("*.safetensors"))


def missing_weights(folder: Path) -> list[str]:
    """Weight files that the target's index names and that are not there; none where there is no index.

    Raises:
        ConfigError: the index is damaged.
    """
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return []
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict):
        raise ConfigError(f"{path} has no weight_map", expected="the file of each tensor")
    return sorted(name for name in set(map(str, names.values())) if not (folder / name).is_file())


def recommended_sampling(folder: Path) -> dict[str, float]:
    """What the target's ``generation_config.json`` recommends of sampling, where it is not neutral.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / "generation_config.json"
    said = read_json(path) if path.is_file() else {}
    numbers = {name: said.get(name) for name in SAMPLING}
    return {
        name: value
        for name, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value != NEUTRAL[name]
    }


def read_shape(folder: Path, trust_remote_code: bool = False) -> TargetShape:
    """Shape of the target from its config.json (the text part of a multimodal one), defaults of its class included.

    Raises:
        ConfigError: config.json lacks a field that planning needs, or has another type there.
    """
    text = text_fields(folder, ("num_hidden_layers", "hidden_size", "vocab_size", "model_type"), trust_remote_code)
    try:
        return TargetShape(
            layers=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            weight_bytes=sum(item.stat().st_size for item in weight_files(folder)),
            family=text["model_type"],
        )
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(
            f"{folder / 'config.json'} does not describe a language model: {faults}",
            expected="num_hidden_layers, hidden_size, vocab_size and model_type",
        ) from error


def target_revision(folder: Path) -> str:
    """Hash (16 hex digits) of config, tokenizer, template, and the headers and sizes of the weight files.

    547 GB are not read to plan a round: a safetensors header names every tensor's dtype, shape and place.
    """
    digest = hashlib.sha256()
    for name in TEXT_FILES:
        path = folder / name
        if path.is_file():
            digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    for path in weight_files(folder):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + hashlib.sha256(_header(path)).digest())
    return digest.hexdigest()[:16]


def _header(path: Path) -> bytes:
    """A safetensors file's header: JSON that names each tensor's place."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return stream.read(min(length, LONGEST_HEADER))


def _weights_fault(folder: Path) -> str | None:
    """What is wrong with the weight files, as far as names, headers and sizes tell; None when nothing is."""
    if missing := missing_weights(folder):
        return f"its index names {len(missing)} weight files that are not there, such as {missing[0]}"
    for path in weight_files(folder):
        try:
            header = _header(path)
            tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
            size = 8 + len(header) + max((entry["data_offsets"][1] for entry in tensors), default=0)
            found = path.stat().st_size
        except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
            return f"{path.name} is no whole safetensors file ({error})"
        if found != size:
            return f"{path.name} has {found:,} bytes, its header tells of {size:,}"
    return None
