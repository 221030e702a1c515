"""What runs in the reference's process: ``python -m infra.engines.reference.entry REQUEST.json ANSWER.json TENSORS``.

The answer says how the target was computed, or why it was refused; TENSORS is a safetensors file with ``hidden``
[sequences, tokens, L + 1, hidden], ``normed`` [sequences, tokens, hidden] and ``next_tokens`` [sequences, tokens].
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from infra.config.round import TargetShape
from infra.engines.reference.streamed import Refused, build_streamed, parts_of
from infra.errors import Eagle3Error
from infra.machine.host import memory_available
from infra.targets.target import read_shape

SPARE_BYTES = 1 << 30
"""For Python and a layer's activations beside the weights and what is kept."""
LOADING = 2
"""A layer's weights exist twice for a moment: as read and as converted."""


@dataclass(frozen=True)
class Choice:
    """How the target is computed."""

    mode: str
    device: str
    dtype: torch.dtype

    @property
    def words(self) -> str:
        """``whole, float32 on cpu``."""
        return f"{self.mode}, {str(self.dtype).removeprefix('torch.')} on {self.device.split(':')[0]}"


def kept_bytes(shape: TargetShape, sequences: list[list[int]]) -> int:
    """What :func:`capture` holds of padded sequences: every tap in float32, twice while stacked, and the logits."""
    tokens = len(sequences) * max(map(len, sequences))
    return 4 * tokens * (2 * (shape.layers + 1) * shape.hidden_size + shape.vocab_size)


def choose(folder: Path, mode: str, device: str, kept: int) -> Choice:
    """The first way that fits in the memory that is free now.

    Args:
        kept: bytes that the answer takes beside the weights.

    Raises:
        Refused: none fits; the sentence says how much is needed and free.
    """
    parts = parts_of(folder)
    whole, layer = sum(parts.values()), max(parts.values())
    if device == "cuda" and mode != "streamed" and (card := _gpu_for(2 * whole)) is not None:
        return Choice("whole", card, torch.bfloat16)
    free = memory_available() - SPARE_BYTES - kept
    needed: dict[str, int] = {}
    for name, dtype, size in (
        ("whole", torch.float32, 4 * whole),
        ("streamed", torch.float32, LOADING * 4 * layer),
        ("streamed", torch.bfloat16, LOADING * 2 * layer),
    ):
        if mode in ("auto", name):
            if size <= free:
                return Choice(name, "cpu", dtype)
            needed[name] = size
    wants = " and ".join(f"{_gb(size)} {name}" for name, size in needed.items())
    raise Refused(f"it needs {wants} and {_gb(kept)} for its states, and {_gb(max(free + kept, 0))} of memory are free")


@torch.inference_mode()
def capture(model: Any, sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    """One forward pass over all sequences, keeping what enters every decoder layer and the final norm.

    Sequences are padded at their ends: under causal attention no token sees what follows it, so no mask is needed.
    """
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise Refused(f"{type(decoder).__name__} has no `layers` and `norm` to listen at")
    longest = max(map(len, sequences))
    tokens = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    hidden: list[torch.Tensor] = []
    normed: list[torch.Tensor] = []

    def enters(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = args[0] if args else kwargs["hidden_states"]
        hidden.append(state.detach().float().cpu().clone())

    hooks = [
        module.register_forward_pre_hook(enters, with_kwargs=True)
        for module in (*decoder.layers[: model.config.get_text_config().num_hidden_layers], decoder.norm)
    ]
    hooks.append(decoder.norm.register_forward_hook(lambda module, args, output: normed.append(output.float().cpu())))
    device = next((item.device for item in model.parameters() if item.device.type != "meta"), torch.device("cpu"))
    logits = model(input_ids=tokens.to(device), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return {
        "hidden": torch.stack(hidden, dim=2),
        "normed": normed[0],
        "next_tokens": logits.argmax(dim=-1).cpu(),
    }


def answer_request(request: dict[str, Any]) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """(what to say, tensors)."""
    folder, trust = Path(request["target"]), bool(request["trust_remote_code"])
    try:
        kept = kept_bytes(read_shape(folder), request["sequences"])
        choice = choose(folder, request["mode"], request["device"], kept)
        try:
            model = load(folder, choice, trust)
        except Refused:
            if request["mode"] != "auto" or choice.mode == "streamed":
                raise
            choice = choose(folder, "streamed", request["device"], kept)
            model = load(folder, choice, trust)
        return {"how": choice.words}, capture(model, request["sequences"])
    except Refused as error:
        return {"refused": str(error)}, {}


def main(request: Path, answer: Path, tensors: Path) -> None:
    """Answer one request."""
    said, made = answer_request(json.loads(request.read_text()))
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, tensors)
    answer.write_text(json.dumps(said))


def load(folder: Path, choice: Choice, trust: bool) -> Any:
    """The target's model.

    Raises:
        Refused: transformers does not know its family, or cannot read its weights.
    """
    if choice.mode == "streamed":
        return build_streamed(folder, choice.dtype, trust)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=choice.dtype, trust_remote_code=trust, output_loading_info=True
        )
    except (ImportError, ValueError, KeyError) as error:
        # A quantised target whose library is not here, or a family that transformers does not know.
        raise Refused(f"transformers cannot load it: {error}") from error
    if info["missing_keys"]:
        raise Refused(f"transformers finds no weights for {', '.join(sorted(info['missing_keys'])[:3])}")
    return model.to(choice.device).eval()


def _gpu_for(size: int) -> str | None:
    """The GPU with most free memory, if the target fits there."""
    if not torch.cuda.is_available():
        return None
    free = {number: torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())}
    best = max(free, key=lambda number: free[number])
    return f"cuda:{best}" if size + 2 * SPARE_BYTES <= free[best] else None


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


if __name__ == "__main__":
    try:
        main(*map(Path, sys.argv[1:4]))
    except Eagle3Error as failure:
        sys.exit(str(failure))
