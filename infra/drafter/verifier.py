"""The folder that speculators' trainer opens as its target ("verifier").

speculators 0.9.0 opens a target's config.json in four places (train/cli.py, models/eagle3/core.py, models/utils.py).
One of them drops ``trust_remote_code``, all take a ``text_config`` that is null for a config, and weights are found in
``model.safetensors`` or by an index only. So the trainer is handed what it can open: the language model's config alone,
as a class of transformers writes it with every value said, and an index of the three tensors that it wants.
"""

import json
import os
import shutil
from pathlib import Path

from infra.targets.target import Target, read_json
from infra.targets.text import open_text
from infra.targets.weights import EMBEDDING, HEAD, NORM, find_stored

INDEX = "model.safetensors.index.json"


def write_verifier(target: Target, folder: Path) -> Path:
    """Write the folder anew: config.json, links to the target's weight files, and an index; copies no weights.

    Raises:
        ConfigError: transformers has no class for the target's config, or a tensor is missing.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(verifier_config(target.path))
    stored = {
        tensor.name: tensor.file for tensor in (find_stored(target.path, names) for names in (EMBEDDING, NORM, HEAD))
    }
    for file in set(stored.values()):
        os.symlink(file.resolve(), folder / file.name)
    index = {"metadata": {}, "weight_map": {name: file.name for name, file in stored.items()}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def verifier_config(target: Path) -> str:
    """config.json for the trainer; ``architectures`` are the target's own, which a draft carries on.

    Raises:
        ConfigError: as :func:`infra.targets.text.open_text`.
    """
    fields = open_text(target).to_dict()
    fields["architectures"] = read_json(target / "config.json").get("architectures") or fields.get("architectures")
    return json.dumps(fields, indent=1, sort_keys=True) + "\n"
