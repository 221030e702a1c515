"""How fast this machine was in earlier rounds; the plan estimates with it."""

import math
import time
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from infra.config.settings import Settings
from infra.machine.learnt import amend, recall
from infra.round.context import Round


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


CPU_GFLOPS = 60.0
"""float32 matrix work of the CPU that the reference was measured on, GFLOP/s."""

REFERENCE = {
    "cpu": (
        135e6,
        Rates(
            start_seconds=35,
            generate_tokens=75,
            extract_tokens=230,
            train_tokens=260,
            serve_tokens=35,
            origin="2 CPU cores, 135M parameters",
        ),
    ),
    "cuda": (
        8e9,
        Rates(
            start_seconds=120,
            generate_tokens=4000,
            extract_tokens=30000,
            train_tokens=20000,
            serve_tokens=1500,
            origin="one H200, 8B parameters",
        ),
    ),
}


def reference_rates(device: str, parameters: float, devices: int) -> Rates:
    """Rates scaled from a machine that was measured: work a token grows with the parameters."""
    base, rates = REFERENCE[device]
    # A smaller target is not taken to be faster than the one that was measured: clients and kernels bound it, too.
    scale = min(1.0, base / max(parameters, 1.0) * max(1, devices))
    if device == "cpu":
        scale *= matrix_gflops() / CPU_GFLOPS
    return Rates(
        start_seconds=rates.start_seconds / scale,
        generate_tokens=rates.generate_tokens * scale,
        extract_tokens=rates.extract_tokens * scale,
        train_tokens=rates.train_tokens * scale,
        serve_tokens=rates.serve_tokens * scale,
        origin=f"scaled from {rates.origin}",
    )


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


def _name(round_: Round) -> str:
    shape = round_.config.target
    return f"{shape.name}/{round_.serving.device}/{round_.config.generate.max_tokens}"


def learnt_rates(round_: Round) -> Rates | None:
    """Rates of the last complete round of this target on this machine, or None."""
    try:
        return Rates.model_validate(recall(rates_path(round_.settings)).get(_name(round_)))
    except ValidationError:
        return None


def learn(round_: Round, rates: Rates) -> None:
    """Remember the rates of a complete round."""
    amend(rates_path(round_.settings), lambda known: known.update({_name(round_): rates.model_dump()}))
