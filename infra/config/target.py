"""What a target's folder says about it: shape, revision, fitness for EAGLE-3."""

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.config.round import TargetConfig, TargetShape
from infra.errors import ConfigError, MissingTarget

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
        MissingTarget: the folder is missing or has no weights; the fix names the command that fetches it.
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
    return Target(
        name=config.name,
        path=folder,
        shape=read_shape(folder),
        revision=target_revision(folder),
        trust_remote_code=config.trust_remote_code,
    )


def weight_files(folder: Path) -> list[Path]:
    """The target's weight files, by name."""
    return sorted(folder.glob("*.safetensors"))


def read_shape(folder: Path) -> TargetShape:
    """Shape of the target from its config.json (the text part of a multimodal one).

    Raises:
        ConfigError: config.json lacks a field that planning needs.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{folder / 'config.json'} is not JSON: {error}") from error
    text = config.get("text_config", config)
    try:
        return TargetShape(
            layers=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            weight_bytes=sum(item.stat().st_size for item in weight_files(folder)),
            family=text["model_type"],
        )
    except KeyError as error:
        raise ConfigError(
            f"{folder / 'config.json'} has no {error.args[0]!r}", expected="a decoder-only language model"
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
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(min(length, 64 << 20))
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + hashlib.sha256(header).digest())
    return digest.hexdigest()[:16]
