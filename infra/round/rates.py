"""How fast this machine was in earlier rounds, and before the first one what a measured machine would take."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from infra.config.round import RoundConfig, TargetShape
from infra.config.settings import Settings
from infra.machine.learnt import amend, recall
from infra.round.context import RoundContext
from infra.round.needs import draft_size
from infra.store.hidden import state_bytes_per_token

STARTS = {"interleaved": 1.5, "abba": 3.0}
"""Engine starts that an evaluation waits for, by its layout: two side by side, or three one after another."""


class Rates(BaseModel):
    """Speeds of one target on one machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start_seconds: float
    generate_tokens: float
    extract_tokens: float
    train_tokens: float
    serve_tokens: float
    answer_tokens: float | None = None
    """Mean answer length, tokens."""
    origin: str
    """Where the figures come from, for the reader of a plan."""


@dataclass(frozen=True)
class Work:
    """What a round asks of a machine.

    Args:
        weight_bytes: size of the target's weights, bytes.
        devices: GPUs that share one copy of the target.
        generating: requests in flight while it answers.
        serving: requests in flight of each measurement.
        sample_tokens: mean length of a sample, tokens.
        token_bytes: hidden states of one token, bytes.
        draft_parameters: parameters of the draft that compute: trained ones and the head over the draft vocabulary.
        draft_steps: draft steps unrolled in training.
        training_devices: GPUs that train.
    """

    weight_bytes: int
    devices: int
    generating: int
    serving: tuple[int, ...]
    sample_tokens: float
    token_bytes: int
    draft_parameters: int
    draft_steps: int
    training_devices: int


def work_of(config: RoundConfig, shape: TargetShape, sample_tokens: float) -> Work:
    """What a round asks of a machine, given its mean sample's length in tokens."""
    _, stored = draft_size(config, shape)
    return Work(
        weight_bytes=shape.weight_bytes,
        devices=config.engines[config.serve_with].tensor_parallel,
        generating=config.generate.concurrency,
        serving=config.evaluate.concurrencies,
        sample_tokens=sample_tokens,
        token_bytes=state_bytes_per_token(config.extract.taps, shape.hidden_size),
        draft_parameters=stored - shape.vocab_size * shape.hidden_size,  # the embedding is looked up, not multiplied
        draft_steps=config.train.draft_steps,
        training_devices=config.train.devices,
    )


def reference_rates(device: str, work: Work) -> Rates:
    """Rates of a round on a machine that has finished none yet, from machines that were measured."""
    return _cuda_rates(work) if device == "cuda" else _cpu_rates(work)


BF16_BYTES = 2

CPU_PARAMETERS = 135e6
CPU_START_SECONDS = 35.0
"""An engine's start: imports for the most part, which a wider CPU makes no faster."""
CPU_TOKEN = {
    "generate_tokens": (2.5e-3, 0.40),
    "extract_tokens": (0.35e-3, 0.16),
    "serve_tokens": (5.3e-3, 1.08),
}
"""A token of 135M parameters on 2 cores: seconds that no arithmetic makes shorter, and GFLOP of float32 matrix work.

Fitted to two machines: 40 GFLOP/s (AVX2) made 80, 229 and 31 tokens/s, 370 GFLOP/s (AVX-512 with AMX) 281, 1,301 and
121."""
CPU_TRAIN_TOKEN_SECONDS = 0.45e-3
"""The trainer for each token beside its matrices, which take six operations a parameter, token and draft step (190
tokens/s at 40 GFLOP/s, 1,024 at 370)."""


def _cpu_rates(work: Work) -> Rates:
    """Work a token grows with the parameters; a smaller target is not taken to be faster: other things bound it."""
    parameters, gflops = max(1.0, work.weight_bytes / (CPU_PARAMETERS * BF16_BYTES)), matrix_gflops()
    speeds = {
        name: 1 / (parameters * (seconds + arithmetic / gflops)) for name, (seconds, arithmetic) in CPU_TOKEN.items()
    }
    matrices = 6e-9 * work.draft_parameters * work.draft_steps / gflops
    return Rates.model_validate(
        {
            **speeds,
            "start_seconds": CPU_START_SECONDS * parameters,
            "train_tokens": 1 / (CPU_TRAIN_TOKEN_SECONDS + matrices),
            "origin": "scaled from 2 CPU cores, 135M parameters",
        }
    )


START_SECONDS = 70.0
"""An engine's start on the GPU, the reading of its weights left out: compilation, graphs (430 s in six starts)."""
LOADED_BYTES = 1e9
"""Weights read a second (547 GB in ten minutes)."""
ENGINE_TOKEN_SECONDS = 1 / 15_600
"""The engine's own Python core for each token that it answers (SmolLM2: 15,600 tokens/s at 103 % of a core)."""
STEP_SECONDS = 0.8e-3
"""Launches of one step of the target, whatever its size."""
READ_BYTES = 3e12
"""Weights that one GPU reads a second: each step reads all of them once."""
PREFILL_TOKENS = 43_000 * 16e9
"""Tokens that one GPU reads a second times the target's bytes (8B: 43,000 tokens/s, capturing or not)."""
REQUEST_SECONDS = 1 / 300
"""This project's client for each request, and"""
STATE_BYTES = 0.38e9
"""bytes of states that it reads, checks and commits a second. Measured through HTTP to committed shards: 12,050
tokens/s (8B, 1,024 tokens, 32 kB a token), 37,000 to 43,000 (SmolLM2, 256 tokens) and 62,000 (1,024 tokens)."""
TRAIN_TOKEN_SECONDS = 12.5e-6
"""The trainer for each token beside its matrices (SmolLM2: 74,600 tokens/s), and"""
TRAIN_FLOPS = 2e14
"""what one GPU does a second in them; six operations a parameter, token and draft step."""


def _cuda_rates(work: Work) -> Rates:
    """What one H200 with 16 cores was measured to do, each step by what bounds it."""
    prefill = PREFILL_TOKENS * work.devices / max(work.weight_bytes, 1)
    client = 1 / (REQUEST_SECONDS / work.sample_tokens + work.token_bytes / STATE_BYTES)
    matrices = 6 * work.draft_parameters * work.draft_steps / TRAIN_FLOPS
    return Rates(
        start_seconds=START_SECONDS + work.weight_bytes / LOADED_BYTES,
        generate_tokens=_answered(work, work.generating),
        extract_tokens=min(prefill, client),
        train_tokens=work.training_devices / (TRAIN_TOKEN_SECONDS + matrices),
        serve_tokens=len(work.serving) / sum(1 / _answered(work, flight) for flight in work.serving),
        origin="reckoned from what one H200 was measured to do",
    )


def _answered(work: Work, in_flight: int) -> float:
    """Tokens a second with so many requests in flight: a step of the target gives each of them one."""
    step = STEP_SECONDS + work.weight_bytes / (READ_BYTES * work.devices)
    return 1 / (ENGINE_TOKEN_SECONDS + step / in_flight)


def matrix_gflops(seconds: float = 0.2) -> float:
    """float32 matrix work that this CPU can do, GFLOP/s, on a linear layer of a small model.

    The quickest of many: what else runs now will not run through the whole round.
    """
    rows, inner, columns = 512, 576, 1536
    left, right = torch.ones(rows, inner), torch.ones(inner, columns)
    torch.mm(left, right)
    end, best = time.perf_counter() + seconds, math.inf
    while (begin := time.perf_counter()) < end:
        torch.mm(left, right)
        best = min(best, time.perf_counter() - begin)
    return 2e-9 * rows * inner * columns / best


def rates_path(settings: Settings) -> Path:
    """File of measured rates."""
    return settings.state_dir / "rates.json"


def _name(context: RoundContext) -> str:
    shape = context.config.target
    return f"{shape.name}/{context.serving.device}/{context.config.generate.max_tokens}"


def learnt_rates(context: RoundContext) -> Rates | None:
    """Rates of the last complete round of this target on this machine, or None.

    Where none had answers of this length, those of another length will do, but for the length itself.
    """
    known, name = recall(rates_path(context.settings)), _name(context)
    found = _read(known.get(name))
    if found is not None:
        return found
    others = (_read(value) for other, value in known.items() if other.startswith(f"{name.rpartition('/')[0]}/"))
    return next((rates.model_copy(update={"answer_tokens": None}) for rates in others if rates is not None), None)


def _read(stored: object) -> Rates | None:
    try:
        return Rates.model_validate(stored)
    except ValidationError:
        return None


def learn(context: RoundContext, rates: Rates) -> None:
    """Remember the rates of a complete round."""
    amend(rates_path(context.settings), lambda known: known.update({_name(context): rates.model_dump()}))
