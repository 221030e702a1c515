"""A report as the smoke round went by hand, and others made from its parts."""

import math

from infra.results import (
    Acceptance,
    Evaluation,
    Measured,
    Predicted,
    Report,
    Speed,
    StepTime,
    Training,
    TrainPoint,
)


def speed(rate: float, first: float = 0.21, between: float = 0.0412) -> Speed:
    return Speed(
        output_tokens=7680,
        seconds=7680 / rate,
        tokens_per_second=rate,
        first_token_p50=first,
        first_token_p95=2 * first,
        between_tokens_p50=between,
        between_tokens_p95=2 * between,
    )


def acceptance(length: float, by_position: tuple[float, ...], prompts: int = 40) -> Acceptance:
    return Acceptance(
        length=length, interval=(length - 0.03, length + 0.03), by_position=by_position, starts=3000, prompts=prompts
    )


def measured(
    prompts: str, found: Acceptance, concurrency: int = 8, plain: float = 148.0, draft: float = 95.0
) -> Measured:
    return Measured(
        prompts=prompts,
        concurrency=concurrency,
        acceptance=found,
        draft=speed(draft),
        plain=speed(plain),
        looping=0.025,
    )


def points(count: int) -> tuple[TrainPoint, ...]:
    """A run that learns: falling loss, rising accuracy, a little unrest."""
    made = []
    for step in range(1, count + 1):
        rise, unrest = 1 - math.exp(-step / 180), 0.03 * math.sin(step * 1.7)
        made.append(
            TrainPoint(
                step=step,
                loss=9 - 5.5 * rise + 5 * unrest,
                accuracy=tuple(max(0.0, top * rise + unrest * top) for top in (0.43, 0.215, 0.12)),
            )
        )
    return tuple(made)


def build(**changes: object) -> Report:
    """The smoke round as it went by hand; ``changes`` replace fields of the report."""
    validation = tuple(
        TrainPoint(step=155 * epoch, loss=9 - 5.2 * rise, accuracy=(0.418 * rise, 0.208 * rise, 0.116 * rise))
        for epoch, rise in enumerate((0.6, 0.82, 0.94, 1.0), start=1)
    )
    fields: dict[str, object] = {
        "round": "smoke",
        "description": "SmolLM2-135M-Instruct on the CPU.",
        "target": "SmolLM2-135M-Instruct",
        "target_revision": "0f3c9a77d1e2b4c5",
        "draft": "smoke-3f2a1b0c9d8e",
        "published": "file:///srv/state/store/published/SmolLM2-135M-Instruct/smoke-3f2a1b0c9d8e/vllm",
        "taps": (2, 15, 27),
        "engine": "vllm",
        "engine_version": "0.32.0",
        "versions": {"speculators": "0.9.0", "torch": "2.13.0+cpu", "git": "1a2b3c4"},
        "steps": (
            StepTime(step="generate", key="aaaaaaaaaaaa", seconds=152.4, reused=True, detail="400 answers"),
            StepTime(step="train", key="bbbbbbbbbbbb", seconds=401.0, reused=False, detail="loss | accuracy"),
        ),
        "counts": {"samples": 400, "tokens": 76741, "truncated": 212},
        "training": Training(
            steps=620,
            epochs=4,
            seconds=401.0,
            tokens=317440,
            resumed=1,
            history=points(620),
            validation=validation,
            trainer_version="0.9.0",
            draft_vocab_size=8192,
            files={"model.safetensors": "ab" * 32, "config.json": "cd" * 32},
        ),
        "evaluation": evaluation(),
        "planned_disk_bytes": 431_000_000,
        "used_disk_bytes": 420_000_000,
        "planned_seconds": 900.0,
        "used_seconds": 780.0,
        "notes": ("the engine came up on rung eager",),
    }
    return Report.model_validate(fields | changes)


def evaluation(*live: Measured, deviation: float = -0.003) -> Evaluation:
    default = (
        measured("heldout", acceptance(1.564, (0.333, 0.154, 0.078))),
        measured("evaluation", acceptance(1.416, (0.262, 0.103, 0.051), prompts=80)),
    )
    return Evaluation(
        engine="vllm",
        engine_version="0.32.0",
        drafts=3,
        layout="interleaved",
        predicted=Predicted(
            acceptance=acceptance(1.568, (0.336, 0.154, 0.079)),
            joint=(0.418, 0.208, 0.116),
            conditional=(0.418, 0.5, 0.55),
        ),
        measured=live or default,
        deviation=deviation,
    )


def unskilled() -> Evaluation:
    """Exactly 1.00 live: the draft proposes and the target takes none of it."""
    nothing = Acceptance(length=1.0, interval=(1.0, 1.0), by_position=(0.0, 0.0, 0.0), starts=3000, prompts=80)
    return evaluation(measured("heldout", nothing), measured("evaluation", nothing), deviation=1.0 / 1.568 - 1)


def one_position() -> Evaluation:
    found = acceptance(1.3, (0.3,))
    plain = measured("evaluation", found, 1, plain=50.0, draft=65.0)
    return plain_evaluation(found, plain)


def plain_evaluation(predicted: Acceptance, *live: Measured) -> Evaluation:
    found = Predicted(acceptance=predicted, joint=(0.3,), conditional=(0.3,))
    return evaluation(*live).model_copy(update={"predicted": found})
