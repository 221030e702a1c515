"""Flow ``parity``: do two engines, or two versions of one, compute the same hidden states for the same tokens?

Before an engine is upgraded, build the new version's environment in a folder of its own and compare it with the one
in use; the round's target, taps and prompts decide what is compared::

    prefect deployment run parity/engines \\
        --param 'extracting={"engine": "vllm"}' \\
        --param 'serving={"engine": "vllm", "environment": "/envs/vllm-next"}'

It ends Completed when drafts and states of the one hold for the other, and Failed with the parity gate's sentence,
which names tap and offset, when they do not.
"""

from typing import Any

from prefect import flow, get_run_logger
from pydantic import BaseModel, ConfigDict, Field

import tasks
from infra.config.load import build_round
from infra.config.round import EngineName, RoundConfig
from infra.config.settings import Settings
from infra.gates.parity import alone
from infra.round.context import RoundContext
from infra.round.gpus import gpus_wanted
from tasks.credentials import use_store_credentials


class EngineChoice(BaseModel):
    """An engine of the round, in its own environment or another."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineName = Field(description="Engine; the round's `engines` must describe it.")
    environment: str = Field(
        default="",
        description="Folder of a Python environment with this engine, for another version of it. Empty: ours.",
    )


@flow(name="parity", persist_result=False)
def parity(
    config: RoundConfig,
    extracting: EngineChoice,
    serving: EngineChoice,
    samples: int = 8,
    overrides: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Compare the hidden states and the tokenisers of two engines, or of two versions of one.

    Before an upgrade: build the new version's environment in a folder, and give it as `serving`, e.g.
    {"engine": "vllm", "environment": "/envs/vllm-next"}, against {"engine": "vllm"} as `extracting`.

    Args:
        config: The round whose target, taps, prompts and engines are compared.
        extracting: The engine that states are extracted with; errors are relative to it.
        serving: The engine, or the version, that will serve.
        samples: How many of the round's prompts both are given.
        overrides: Changes to single fields of the round by dotted name.
    """
    merged = build_round(config.model_dump(mode="json"), overrides, origin="the deployment's round")
    settings = Settings()
    use_store_credentials(settings)
    sides = [(RoundContext(alone(merged, choice.engine, samples), settings), choice.environment)
             for choice in (extracting, serving)]  # fmt: skip
    context = sides[0][0]
    with tasks.ends_with_its_run(), context.lock():
        for side, environment in sides:
            tasks.fit_for_parity(side, environment)
        with tasks.gpu_slot(*(side for side, _ in sides)):
            states = []
            for side, environment in sides:
                _ready(side)
                states.append(tasks.parity_side(side, environment))
            _ready(context)
            verdict = tasks.parity_verdict(context, states)
    get_run_logger().info(f"{verdict.serving} and {verdict.extracting} agree")


def _ready(side: RoundContext) -> None:
    """Get the GPUs free that a side wants, if any."""
    if gpus_wanted(side.config):
        tasks.ready_gpus(side)
