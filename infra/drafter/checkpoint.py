"""Drafts on disk: the trainer's checkpoints, and the folder that is published.

A checkpoint folder holds ``model.safetensors``, ``config.json``, optimiser and schedule, and ``training_state.json``;
it is moved into place whole (:mod:`infra.drafter.trainer_entry`). Names of tensors and config fields are speculators'.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from infra.engines.draft import WEIGHTS, read_config, write_draft
from infra.errors import TrainingError

SAVING = ".saving"
REPLACED = ".replaced-"


@dataclass(frozen=True)
class DraftShape:
    """What a draft must look like to serve a target.

    Args:
        taps: taps of the target that feed it.
        layers: its decoder layers.
        hidden_size: width, the target's.
        vocab_size: the target's vocabulary.
        draft_vocab_size: tokens it can propose; None for all of them.
        norm_before_fc: taps are normalised before they are joined.
        norm_output: the normalised state is fed to the next draft step.
    """

    taps: tuple[int, ...]
    layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int | None = None
    norm_before_fc: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint: its folder, epoch, and the optimiser steps behind it."""

    path: Path
    epoch: int
    step: int
    ends_epoch: bool


def settle(root: Path) -> list[Checkpoint]:
    """Make a checkpoints folder fit to resume from, whatever the last attempt was killed at.

    A checkpoint that was being replaced comes back unless its successor is in place; anything incomplete, half
    saved or ``interrupted`` goes.

    Returns:
        The complete checkpoints, oldest first.
    """
    if not root.is_dir():
        return []
    for old in sorted(root.glob(f"{REPLACED}*")):
        name = old.name.removeprefix(REPLACED)
        if (root / name).exists():
            shutil.rmtree(old)
        else:
            os.rename(old, root / name)
    for leftover in (root / SAVING, root / "interrupted"):
        shutil.rmtree(leftover, ignore_errors=True)
    found = []
    for folder in root.iterdir():
        if folder.is_symlink() or not folder.is_dir() or not folder.name.isdigit():
            continue
        checkpoint = _read_checkpoint(folder)
        if checkpoint is None:
            shutil.rmtree(folder)
        else:
            found.append(checkpoint)
    return sorted(found, key=lambda item: item.step)


def differences(config: Mapping[str, Any], shape: DraftShape) -> dict[str, tuple[Any, Any]]:
    """What a draft's config.json says otherwise than what was asked for: by field, what is there and what was asked."""
    layer = config["transformer_layer_config"]
    wanted = {
        "draft_vocab_size": (config.get("draft_vocab_size"), shape.draft_vocab_size or shape.vocab_size),
        "taps": (tuple(config.get("eagle_aux_hidden_state_layer_ids") or ()), shape.taps),
        "norm_before_residual": (config.get("norm_before_residual"), False),
        "norm_before_fc": (config.get("norm_before_fc", False), shape.norm_before_fc),
        "fc_norm": (config.get("fc_norm", False), False),
        "norm_output": (config.get("norm_output", False), shape.norm_output),
        "model_type of its layers": (layer.get("model_type"), "llama"),
        "layers": (layer.get("num_hidden_layers"), shape.layers),
        "layer_types": (set(layer.get("layer_types") or ["full_attention"]), {"full_attention"}),
    }
    return {name: (found, expected) for name, (found, expected) in wanted.items() if found != expected}


def verify_config(config: Mapping[str, Any], shape: DraftShape, where: str) -> None:
    """Check that a draft's config.json is of the draft that was asked for.

    Args:
        where: the draft in words, e.g. ``the draft in /folder``.

    Raises:
        TrainingError: naming the first field that is not as asked.
    """
    for name, (found, expected) in differences(config, shape).items():
        raise TrainingError(f"{where} has {name} {found!r}", expected=repr(expected))


def verify_draft(folder: Path, shape: DraftShape) -> None:
    """Check that ``folder`` holds the draft that was asked for.

    Raises:
        TrainingError: naming the first field or tensor that is not as asked, or not finite.
    """
    try:
        verify_config(read_config(folder), shape, f"the draft in {folder}")
    except TrainingError as error:
        raise TrainingError(
            error.what, expected=error.expected, fix=f"delete {folder} and start the round again"
        ) from error
    verify_weights(folder, shape)


def verify_weights(folder: Path, shape: DraftShape) -> None:
    """Check that a draft's tensors are finite and have the shapes that were asked for.

    Raises:
        TrainingError: naming the first that has not.
    """
    size = shape.draft_vocab_size or shape.vocab_size
    shapes = {
        "fc.weight": [shape.hidden_size, shape.hidden_size * len(shape.taps)],
        "lm_head.weight": [size, shape.hidden_size],
    }
    if size != shape.vocab_size:
        shapes |= {"d2t": [size], "t2d": [shape.vocab_size]}
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as weights:
            names = set(weights.keys())
            for name, expected_shape in shapes.items():
                found_shape = weights.get_slice(name).get_shape() if name in names else None
                if found_shape != expected_shape:
                    raise TrainingError(f"the draft in {folder} has {name} {found_shape}", expected=str(expected_shape))
            for name in sorted(names):
                tensor = weights.get_tensor(name)
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    raise TrainingError(
                        f"{name} of the draft in {folder} holds NaN or Inf", fix="lower train.learning_rate"
                    )
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"the draft's weights in {folder} cannot be read: {error}") from error


def publishable(checkpoint: Path, out: Path, target_name: str) -> Path:
    """Write the folder ``out`` that ``vllm serve`` loads on any machine: bf16 weights and a config without local paths.

    Args:
        checkpoint: a checkpoint or draft folder.
        out: the new folder; it appears whole, an earlier one is replaced.
        target_name: what the target is called (a hub id where it has one); stands where the trainer left a path.

    Raises:
        TrainingError: a local path would be published.
    """
    config = read_config(checkpoint)
    local = config["speculators_config"]["verifier"].get("name_or_path") or ""
    config["speculators_config"]["verifier"]["name_or_path"] = target_name
    # vLLM counts three taps unless the layer config says otherwise (vllm-project/vllm#54526).
    config["transformer_layer_config"]["num_aux_hidden_states"] = len(config["eagle_aux_hidden_state_layer_ids"])
    config.pop("_name_or_path", None)
    for dtype in {"dtype", "torch_dtype"} & set(config):
        config[dtype] = "bfloat16"
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    if local.startswith("/") and local in text:
        raise TrainingError(f"config.json of {checkpoint} names the local path {local} in an unknown field")
    weights = load_file(checkpoint / WEIGHTS)
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            weights[name] = tensor.to(torch.bfloat16)
    return write_draft(out, weights, {"config.json": text})


def best(checkpoints: Sequence[Checkpoint], accepted: dict[int, float]) -> Checkpoint:
    """The checkpoint at the end of the epoch with the most drafts accepted on held-out rows (ties: the later one).

    Args:
        checkpoints: complete checkpoints, at least one of which ends an epoch.
        accepted: by epoch, the sum of the joint step accuracies.
    """
    ends = [item for item in checkpoints if item.ends_epoch]
    return max(ends, key=lambda item: (accepted.get(item.epoch, -1.0), item.epoch))


def _read_checkpoint(folder: Path) -> Checkpoint | None:
    try:
        state = json.loads((folder / "training_state.json").read_text())
        with safe_open(folder / WEIGHTS, framework="pt") as weights:
            complete = bool(weights.keys())
        if not complete or not all((folder / name).is_file() for name in ("optimizer_state_dict.pt", "config.json")):
            return None
        return Checkpoint(folder, int(folder.name), state["global_step"], state["local_step"] == 0)
    except (OSError, ValueError, LookupError, TypeError, SafetensorError):
        return None
