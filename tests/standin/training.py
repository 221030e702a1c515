"""What the real trainer needs to train a draft of a tiny random target: its folder, hidden states and samples."""

from dataclasses import dataclass
from pathlib import Path

import torch
from standin.tiny import random_llama
from transformers import LlamaForCausalLM

from infra.config.training import TrainConfig
from infra.drafter.job import TrainJob
from infra.store.hidden import StatesMeta, plan_shards, state_bytes_per_token
from infra.store.objects import ObjectStore
from infra.store.samples import Sample
from infra.store.writer import ShardWriter
from infra.targets.target import Target, read_shape, target_revision

TAPS = (1, 2, 3)
PREFIX = "rounds/tiny/hidden/0123456789ab"
TRAIN, HELDOUT, PROMPT, ANSWER = 20, 4, 6, 26
"""Samples to train on and held out; tokens of each one's prompt and answer."""


@dataclass(frozen=True)
class Trainee:
    """A target with the samples and states to train a draft for it.

    Attributes:
        url: the store with the hidden states, below ``PREFIX``.
        samples: training ones first; every one has as many tokens as the others.
        taps: of the stored states.
    """

    target: Target
    url: str
    samples: list[Sample]
    taps: tuple[int, ...] = TAPS

    def job(self, workdir: Path, **changes: object) -> TrainJob:
        """A training in ``workdir``; ``changes`` are fields of its ``TrainConfig``."""
        small = {"epochs": 2, "sequence_tokens": 64, "layers": 1}
        fields = small | {"optimizer": "adamw", "learning_rate": 5e-3, "warmup": 0.0} | changes
        config = TrainConfig(**fields)  # type: ignore[arg-type]
        return TrainJob(config, self.target, "cpu", self.taps, self.url, PREFIX, draft_vocab_size=128, workdir=workdir)


def make_trainee(folder: Path) -> Trainee:
    """A random target in ``folder``, with the hidden states of its greedy answers to random prompts."""
    path = folder / "tiny"
    random_llama(path, vocabulary=256, dtype=torch.bfloat16)
    target = Target(name="tiny", path=path, shape=read_shape(path), revision=target_revision(path))
    torch.manual_seed(1)
    url = f"file://{folder / 'store'}"
    model = LlamaForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    last: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(
        lambda _m, _i, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    tokens = torch.randint(0, 32, (TRAIN + HELDOUT, PROMPT))
    with torch.no_grad():
        for _ in range(ANSWER):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
        hidden = model(tokens, output_hidden_states=True).hidden_states
    states = torch.stack([*(hidden[tap] for tap in TAPS), last[-1]], dim=2).to(torch.bfloat16)
    return stored_trainee(target, url, tokens, states)


def random_trainee(target: Target, url: str, taps: tuple[int, ...]) -> Trainee:
    """Random tokens and states for a target whose layers are nowhere."""
    torch.manual_seed(2)
    tokens = torch.randint(0, target.shape.vocab_size, (TRAIN + HELDOUT, PROMPT + ANSWER))
    states = torch.randn(*tokens.shape, len(taps) + 1, target.shape.hidden_size).to(torch.bfloat16)
    return stored_trainee(target, url, tokens, states, taps)


def stored_trainee(
    target: Target, url: str, tokens: torch.Tensor, states: torch.Tensor, taps: tuple[int, ...] = TAPS
) -> Trainee:
    """Tokens int64 [samples, tokens] and states [samples, tokens, taps + 1, hidden], put into a store."""
    counts = [tokens.shape[1]] * len(tokens)
    plan = plan_shards(counts, state_bytes_per_token(taps, states.shape[-1]), 1 << 16)
    meta = StatesMeta(
        taps=taps,
        final="pre_norm",
        dtype="bf16",
        hidden_size=states.shape[-1],
        engine="reference",
        engine_version="1",
        target_revision="r",
    )
    for shard in plan:
        writer = ShardWriter(ObjectStore(url), PREFIX, shard, meta, 1 << 15)
        for row in range(shard.first_row, shard.end_row):
            writer.add(row, tokens[row], states[row])
        writer.commit()
    samples = [
        Sample(
            row=row, sample_id=f"s{row}", messages=[], input_ids=ids, loss_mask=[0] * PROMPT + [1] * ANSWER,
            split="train" if row < TRAIN else "heldout", finish_reason="length", engine="reference", sampling={},
        )
        for row, ids in enumerate(tokens.tolist())
    ]  # fmt: skip
    return Trainee(target, url, samples, taps)
