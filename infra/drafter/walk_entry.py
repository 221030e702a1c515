"""What runs in the walk's process: ``python -m infra.drafter.walk_entry REQUEST.json ANSWER.jsonl``.

One line of the answer is one sample's counts (:mod:`infra.drafter.walk`).
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

from infra.drafter.walk import accepted_from, count_steps, walk_chain
from infra.store.reader import StatesReader


def load_draft(folder: Path) -> Eagle3DraftModel:
    """The draft in fp32 on CPU, from its folder alone: nothing of the target is needed to draft.

    Raises:
        ValueError: the folder lacks a weight that drafting needs.
    """
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = None
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel(config=config)
    # The model's own tensors are fp32; copying into them converts.
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    lacking = [name for name in missing if not name.startswith("verifier_")]
    if lacking or unexpected:
        raise ValueError(f"{folder} does not fit its config: it lacks {lacking} and has {unexpected} too much")
    return model.eval()


@torch.inference_mode()
def draft_chains(model: Eagle3DraftModel, states: torch.Tensor, tokens: torch.Tensor, drafts: int) -> torch.Tensor:
    """Target ids int64 [drafts, tokens - 1]: draft k of the chain whose last known state is position i.

    The chain is teacher-forced: draft k is made after the target's tokens up to i + 1 + k, which is what serving
    does as long as every earlier draft was accepted; what comes after a wrong one is never looked at.

    Args:
        states: [tokens, taps + 1, hidden]; the last slot is not fed to the draft.
        tokens: int64 [tokens].
        drafts: chain length.
    """
    drafted = model(
        hidden_states=states[:-1, :-1].flatten(1).float().unsqueeze(0),
        input_ids=tokens[1:].unsqueeze(0),
        document_ids=torch.zeros(1, len(tokens) - 1, dtype=torch.long),
        ttt_steps=drafts,
    )
    ids = torch.cat(drafted)
    return ids if model.d2t is None else ids + model.d2t[ids]


def correctness(drafted: torch.Tensor, tokens: torch.Tensor) -> NDArray[np.bool_]:
    """bool [drafts, tokens]: whether draft k of position i is token i + 2 + k; False where there is no such token."""
    right: NDArray[np.bool_] = np.zeros((len(drafted), len(tokens)), dtype=np.bool_)
    for step, ids in enumerate(drafted):
        compared = max(0, len(tokens) - 2 - step)
        right[step, :compared] = (ids[:compared] == tokens[2 + step :]).numpy()
    return right


def walk_rows(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Counts of every row asked for, one sample in memory at a time."""
    model = load_draft(Path(request["draft"]))
    reader = StatesReader(request["url"], request["prefix"])
    for asked in request["rows"]:
        row = reader.read(asked["row"])
        tokens = row["token_ids"]
        right = correctness(draft_chains(model, row["hidden_states"], tokens, request["drafts"]), tokens)
        accepted = accepted_from(right, asked["first"], asked["end"])
        chain = walk_chain(accepted, request["drafts"])
        steps = count_steps(right, asked["first"], asked["end"])
        yield {"row": asked["row"], **asdict(chain), **asdict(steps), "accepted_from": accepted}


def main(request: Path, answer: Path) -> None:
    """Answer one request."""
    with answer.open("w") as stream:
        for counts in walk_rows(json.loads(request.read_text())):
            stream.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
