"""A draft's folder in speculators' format, and what an engine that reads another one says of its own layout."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from infra.config.version import Version
from infra.engines.layer_ids import LayerNumbers
from infra.errors import TrainingError

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class DraftLayout:
    """How a draft is rewritten for an engine that does not load it as the trainer writes it.

    Args:
        inexpressible: given a draft's config.json (or what is known of it before training) and the engine's version,
            what the layout cannot express, in one sentence; "" for nothing. May raise ConfigError for a version that
            cannot be read.
        first_version: given the config.json, the first version of the engine that reads all of it as it was trained.
        write: given the draft's folder, a new one and the taps in the engine's numbering, writes the new folder, which
            appears whole, and returns it. Raises ConfigError where the layout cannot express the draft, and
            TrainingError where the draft is not what it should be.
        embeds: whether the layout has the draft's embedding.
    """

    inexpressible: Callable[[Mapping[str, Any], str], str]
    first_version: Callable[[Mapping[str, Any]], Version]
    write: Callable[[Path, Path, LayerNumbers], Path]
    embeds: bool


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a draft.

    Raises:
        TrainingError: it is missing, not JSON, or not speculators' EAGLE-3.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise TrainingError(f"{folder} has no usable config.json: {error}", expected="a draft folder") from error
    if config.get("speculators_model_type") != "eagle3":
        raise TrainingError(f"{folder} is no EAGLE-3 draft in speculators' format")
    return config


def write_draft(out: Path, weights: Mapping[str, torch.Tensor], texts: Mapping[str, str]) -> Path:
    """Write a draft's folder: weights, and text files by name. It appears whole; an earlier one is replaced."""
    partial = out.with_name(out.name + ".partial")
    for stale in (partial, out):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_file(dict(weights), partial / WEIGHTS, metadata={"format": "pt"})
        for name, text in texts.items():
            (partial / name).write_text(text)
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk its room is wanted
        raise
    return out
