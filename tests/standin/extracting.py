"""Extraction without a round: a target that is a head alone, an engine whose files are made beforehand."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from standin import linking_engine
from standin.tiny import small_round

from infra.config.round import RoundConfig, TargetShape
from infra.config.settings import Settings
from infra.round.context import RoundContext
from infra.store.objects import ObjectStore
from infra.store.samples import Sample, Samples, write_samples
from infra.targets.target import Target

TAPS = (2, 15, 27)
FILES = 16
VOCABULARY = 16_384


@dataclass(frozen=True)
class Shape:
    """Samples of one kind.

    Attributes:
        samples: how many are asked for.
        tokens: of each.
        hidden: width of the target's residual stream.
        concurrency: requests in flight.
        shard_bytes: bound of a shard and of an object, bytes.
    """

    samples: int
    tokens: int
    hidden: int
    concurrency: int
    shard_bytes: int

    @property
    def state_bytes(self) -> int:
        """Bytes of one sample's states."""
        return self.tokens * (len(TAPS) + 1) * self.hidden * 2


def make_files(folder: Path, shape: Shape) -> list[list[int]]:
    """The engine's files, and a target whose head gives the token that the engine goes on with; the prompts."""
    files, target = folder / "files", folder / "target"
    files.mkdir()
    target.mkdir()
    torch.manual_seed(0)
    head = torch.randn(VOCABULARY, shape.hidden).to(torch.bfloat16)
    save_file(
        {"lm_head.weight": head, "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16)},
        target / "model.safetensors",
    )
    (target / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5}))
    prompts, following = [], {}
    for number in range(FILES):
        prompt = [number, *torch.randint(VOCABULARY, (shape.tokens - 1,)).tolist()]
        states = torch.randn(shape.tokens, len(TAPS) + 1, shape.hidden).to(torch.bfloat16)
        states[-1, -1] = 8 * head[prompt[1]]
        save_file({"hidden_states": states, "token_ids": torch.tensor(prompt)}, files / f"{number}.safetensors")
        prompts.append(prompt)
        following[str(number)] = prompt[1]
    (files / "next.json").write_text(json.dumps(following))
    return prompts


def make_round(folder: Path, store: Path, shape: Shape, prompts: list[list[int]]) -> RoundContext:
    """A round whose samples are the prompts again and again."""
    plain = small_round(folder / "none", folder / "none") | {"name": "bench"}
    plain["extract"] = {
        "taps": list(TAPS),
        "shard_bytes": shape.shard_bytes,
        "object_bytes": shape.shard_bytes,
        "concurrency": shape.concurrency,
    }
    context: Any = RoundContext(
        RoundConfig.model_validate(plain), Settings(state_dir=folder / "state", store_url=f"file://{store}")
    )
    shape_of_target = TargetShape(
        layers=30, hidden_size=shape.hidden, vocab_size=VOCABULARY, weight_bytes=1, family="llama"
    )
    context.target = Target(name="t", path=folder / "target", shape=shape_of_target, revision="0" * 16)
    context.versions = {"vllm": "0.32.0", "speculators": "0.9.0"}
    context.keys = SimpleNamespace(hidden="k" * 12, items=lambda: {"hidden": "k" * 12}.items())
    apart = ObjectStore(f"file://{folder}/samples")
    rows = (
        Sample(row, f"s{row}", [], prompts[row % FILES], [1] * shape.tokens, "train", "stop", "vllm", {})
        for row in range(shape.samples)
    )
    write_samples(apart, "samples", rows)
    context.samples = Samples(apart, "samples")
    return context


@contextmanager
def engine(folder: Path) -> Iterator[str]:
    """The stand-in's URL."""
    (folder / "staging").mkdir(exist_ok=True)
    command = [sys.executable, linking_engine.__file__, str(folder / "files"), str(folder / "staging")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()
