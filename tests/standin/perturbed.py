"""Drafts with one fault, to show that a measure sees it."""

import json
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file

from infra.drafter.checkpoint import WEIGHTS, read_config, write_draft

Perturbation = Literal["layers_permuted", "taps_shifted"]


def perturbed(draft: Path, out: Path, how: Perturbation) -> Path:
    """Write a copy of a published draft with one fault.

    ``layers_permuted``: the taps reach the draft in another order (blocks of fc's columns rotated by one).
    ``taps_shifted``: every tap is taken one layer later.
    """
    config = read_config(draft)
    weights = load_file(draft / WEIGHTS)
    taps = list(config["eagle_aux_hidden_state_layer_ids"])
    if how == "layers_permuted":
        blocks = weights["fc.weight"].chunk(len(taps), dim=1)
        weights["fc.weight"] = torch.cat([*blocks[1:], blocks[0]], dim=1).contiguous()
    else:
        config["eagle_aux_hidden_state_layer_ids"] = [tap + 1 for tap in taps]
    return write_draft(out, weights, {"config.json": json.dumps(config, indent=2, sort_keys=True) + "\n"})
