"""What runs in the opening's process: ``python -m infra.drafter.opening_entry FOLDER --round-args N [arguments]``.

The real trainer's own reading of its arguments and of the target's config, up to the draft it would train: built
without storage, and without the target's weights. FOLDER gets the draft's config.json. The last N arguments are the
round's ``train.extra_args``; those that would move what the pipeline places are refused.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# First: it registers the backend, and speculators' command line collects the backends' arguments when it is imported.
import infra.drafter.transfer  # noqa: F401  # isort: skip
from speculators.model import DraftVocabMixin, SpeculatorModel
from speculators.train import cli
from speculators.train.config import TrainConfig
from speculators.train.vocab_mapping import get_target_vocab_size

from infra.drafter.trainer_entry import own_arguments
from infra.errors import TrainingError

PLACED = frozenset(
    {
        "speculator_type", "verifier_name_or_path", "data_path", "save_path", "log_dir", "hidden_states_backend",
        "states_url", "states_prefix", "on_missing", "train_data_ratio", "dry_run", "from_pretrained", "d2t_path",
        "t2d_path", "token_freq_path", "events", "device", "free_bytes",
    }
)  # fmt: skip
"""Settings of the trainer that the pipeline relies on."""


def settings_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Every setting by name, ours among them, as the trainer reads its arguments; ends the process as it would."""
    own, rest = own_arguments(arguments)
    return TrainConfig.resolve(rest).flatten() | vars(own)


def refuse_moved(ours: dict[str, Any], whole: dict[str, Any]) -> None:
    """Refuse further arguments that change what the pipeline places.

    Raises:
        TrainingError: naming them.
    """
    moved = sorted(name for name in PLACED & whole.keys() if ours.get(name) != whole[name])
    if moved:
        flags = ", ".join("--" + name.replace("_", "-") for name in moved)
        raise TrainingError(f"it would change {flags}, which the pipeline sets itself")


def open_draft(settings: dict[str, Any]) -> Any:
    """The draft that the trainer would make, without storage.

    Raises:
        Exception: whatever speculators and transformers raise at this target and these arguments.
    """
    # Reading weights is what is left out; opening the target's config for them is not.
    DraftVocabMixin._load_verifier_weights = lambda self, **_: None  # type: ignore[method-assign]
    args = argparse.Namespace(**settings)
    registry = SpeculatorModel.registry or {}
    model_class = registry[args.speculator_type]
    size = args.draft_vocab_size or get_target_vocab_size(None, args.verifier_name_or_path)
    with torch.device("meta"):
        model = cli.build_draft_model(args, model_class, None, None, size)
    model_class.get_trainer_kwargs(**vars(args))
    return model


def main(folder: Path, arguments: Sequence[str], further: int) -> None:
    """Write the draft's config.json into ``folder``."""
    ours = settings_of(arguments[: len(arguments) - further])
    whole = settings_of(arguments)
    refuse_moved(ours, whole)
    open_draft(whole).config.save_pretrained(folder)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[4:], int(sys.argv[3]))
    except Exception as error:
        sys.exit(f"{error.what if isinstance(error, TrainingError) else f'{type(error).__name__}: {error}'}")
