"""The draft that a training starts from (``train.from``): whether it fits, and how the trainer is handed it.

speculators 0.9.0 loads such a draft by ``--from-pretrained``: its config and weights are taken as they are, whatever
the flags say of the draft's shape, in the dtype that they are stored in (train/cli.py, ``build_draft_model``).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from infra.drafter.checkpoint import DraftShape, differences, verify_weights
from infra.engines.draft import WEIGHTS, read_config, write_draft
from infra.errors import ConfigError, MissingDraft, TrainingError
from infra.targets.target import Target
from infra.targets.weights import EMBEDDING, find_stored

EMBEDDED = "embed_tokens.weight"
COMPARED_ROWS = 64
"""Rows of the embedding that are compared with the target's."""
CLOSE = 0.02
"""Relative difference of a number that went through bfloat16 or float16, at most, and room to spare."""
LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "hidden_act", "rms_norm_eps", "rope_parameters", "attention_bias", "mlp_bias",
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """A draft to start from.

    Args:
        said: what the round calls it.
        folder: its folder, in speculators' format.
        digest: hash of its config and weights, 16 hex digits.
    """

    said: str
    folder: Path
    digest: str

    @property
    def words(self) -> str:
        """Name and hash, for reports and cards: of a folder its last part, since they are read elsewhere."""
        name = self.said if ":" in self.said else self.folder.name
        return f"{name} ({self.digest})"


def read_start(said: str, folder: Path) -> Start:
    """The draft in a folder; its weights are read once, for the hash.

    Raises:
        MissingDraft: there is none.
    """
    digest = hashlib.sha256()
    for name in ("config.json", WEIGHTS):
        try:
            with (folder / name).open("rb") as stream:
                digest.update(f"{name}\0".encode() + hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise MissingDraft(
                f"the draft to start from ({said}) cannot be read: {folder / name}: {error.strerror or error}",
                expected=f"a folder with config.json and {WEIGHTS}, as speculators writes them",
                fix="correct train.from, or leave it out to start anew",
            ) from error
    return Start(said, folder, digest.hexdigest()[:16])


def start_faults(
    start: Start, shape: DraftShape, planned: Mapping[str, Any], target: Target | None = None
) -> Iterator[str]:
    """Why a training cannot start from a draft, in sentences; none when it can.

    Args:
        shape: what the round's draft must look like.
        planned: config.json of the draft that the round would make, or what is known of it.
        target: the target; None while it is not here.
    """
    name = f"the draft to start from ({start.said})"
    try:
        config = read_config(start.folder)
        other = differences(config, shape) | _layer_differences(config, planned)
    except (TrainingError, LookupError, TypeError, AttributeError) as error:
        yield f"{name} is none that speculators wrote: {error}"
        return
    if other:
        said = "; ".join(f"{field} is {found!r} there and {wanted!r} here" for field, (found, wanted) in other.items())
        yield (
            f"{name} is another one than this round makes: {said}. To mend it: set these as they are there, or leave "
            "train.from out to start anew"
        )
        return
    try:
        verify_weights(start.folder, shape)
    except TrainingError as error:
        yield f"{name} cannot be used: {error.what}"
        return
    if target is not None and not _same_embedding(start.folder, target):
        yield (
            f"{name} was trained for another target: its copy of the embedding is not that of {target.name}. To mend "
            "it: start from a draft of this target, or leave train.from out"
        )


def write_start(start: Start, verifier: Path, folder: Path) -> Path:
    """Write the folder that the trainer loads: float32, which it trains in, and this machine's target in its config.

    Args:
        verifier: the target as the trainer opens it.
        folder: the new folder; it appears whole, an earlier one is replaced.

    Raises:
        MissingDraft: its files are not those that were found when the round was planned.
    """
    if read_start(start.said, start.folder).digest != start.digest:
        raise MissingDraft(f"the draft to start from ({start.said}) has changed since", fix="start the round again")
    config = read_config(start.folder)
    config["speculators_config"]["verifier"]["name_or_path"] = str(verifier)
    for dtype in {"dtype", "torch_dtype"} & set(config):
        config[dtype] = "float32"
    weights = load_file(start.folder / WEIGHTS)
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            weights[name] = tensor.to(torch.float32)
    return write_draft(folder, weights, {"config.json": json.dumps(config, indent=2) + "\n"})


def kept_tokens(start: Start) -> torch.Tensor | None:
    """Target ids that the draft can propose, int64 [draft vocabulary], ascending; None for all of them.

    Raises:
        TrainingError: the weights cannot be read.
    """
    try:
        with safe_open(start.folder / WEIGHTS, framework="pt") as weights:
            if "d2t" not in weights.keys():  # noqa: SIM118 (a reader, not a mapping)
                return None
            offsets: torch.Tensor = weights.get_tensor("d2t").to(torch.int64)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"the vocabulary of {start.folder} cannot be read: {error}") from error
    return offsets + torch.arange(len(offsets))


def _layer_differences(config: Mapping[str, Any], planned: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields of the decoder layers that differ: there, and here; an older way of writing them is none."""
    from transformers import LlamaConfig  # it takes seconds to import

    wanted = planned.get("transformer_layer_config", {})
    if "hidden_size" not in wanted:
        return {}
    there, here = (
        LlamaConfig.from_dict(dict(layers)).to_dict() for layers in (config["transformer_layer_config"], wanted)
    )
    return {name: (there.get(name), here.get(name)) for name in LAYER_FIELDS if there.get(name) != here.get(name)}


def _same_embedding(draft: Path, target: Target) -> bool:
    """Whether some rows of the draft's embedding are the target's; a draft without one gets the target's."""
    try:
        stored = find_stored(target.path, EMBEDDING)
        with safe_open(draft / WEIGHTS, framework="pt") as ours, safe_open(stored.file, framework="pt") as theirs:
            if EMBEDDED not in ours.keys():  # noqa: SIM118 (a reader, not a mapping)
                return True
            mine, its = ours.get_slice(EMBEDDED), theirs.get_slice(stored.name)
            if mine.get_shape() != its.get_shape():
                return False
            step = max(1, target.shape.vocab_size // COMPARED_ROWS)
            rows = range(0, target.shape.vocab_size, step)
            return all(torch.allclose(mine[row].float(), its[row].float(), rtol=CLOSE, atol=1e-6) for row in rows)
    except (ConfigError, OSError, SafetensorError):
        return True  # other checks say so
