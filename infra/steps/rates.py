"""How fast this machine was in earlier rounds; the plan estimates with it."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.config.settings import Settings
from infra.steps.context import Round


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


REFERENCE = {
    "cpu": (
        135e6,
        Rates(
            start_seconds=75,
            generate_tokens=200,
            extract_tokens=900,
            train_tokens=900,
            serve_tokens=90,
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
    scale = base / max(parameters, 1.0) * max(1, devices)
    return Rates(
        start_seconds=max(20.0, rates.start_seconds / scale if scale < 1 else rates.start_seconds),
        generate_tokens=rates.generate_tokens * scale,
        extract_tokens=rates.extract_tokens * scale,
        train_tokens=rates.train_tokens * min(1.0, scale) if scale < 1 else rates.train_tokens,
        serve_tokens=rates.serve_tokens * scale,
        origin=f"scaled from {rates.origin}",
    )


def rates_path(settings: Settings) -> Path:
    """File of measured rates."""
    return settings.state_dir / "rates.json"


def _name(round_: Round) -> str:
    shape = round_.config.target
    return f"{shape.name}/{round_.serving.device}/{round_.config.generate.max_tokens}"


def learnt_rates(round_: Round) -> Rates | None:
    """Rates of the last complete round of this target on this machine, or None."""
    path = rates_path(round_.settings)
    if not path.is_file():
        return None
    entry = json.loads(path.read_text()).get(_name(round_))
    return None if entry is None else Rates.model_validate(entry)


def learn(round_: Round, rates: Rates) -> None:
    """Remember the rates of a complete round."""
    path = rates_path(round_.settings)
    known = json.loads(path.read_text()) if path.is_file() else {}
    known[_name(round_)] = rates.model_dump()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(known, indent=1))
    temporary.replace(path)
