"""The stand-in in vLLM's place, in this process."""

from collections.abc import Sequence

import pytest
from standin.engine import StandInEngine

import tasks
from infra.engines import layer_ids, limits
from infra.engines.vllm import engine as vllm

NUMBERS_AS = "0.32.0"
"""The version of vLLM whose layer ids the stand-in takes."""


def instead_of_vllm(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-in in vLLM's place, and let retries come at once."""
    patch.setattr(vllm, "ENGINE", StandInEngine())
    patch.setattr(limits, "engine_layer_ids", _layer_ids)
    for task in (tasks.generate, tasks.convention, tasks.extract, tasks.train, tasks.evaluate):
        patch.setattr(task, "retry_delay_seconds", 0)  # none: Prefect then retries at once


def _layer_ids(engine: str, version: str, family: str, taps: Sequence[int], layers: int) -> tuple[int, ...]:
    known = NUMBERS_AS if version.endswith("-standin") else version
    return layer_ids.engine_layer_ids(engine, known, family, taps, layers)
