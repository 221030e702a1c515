"""The stand-in in vLLM's place, in this process."""

import pytest
from standin.engine import StandInEngine

import tasks
from infra.engines.vllm import engine as vllm


def instead_of_vllm(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-in in vLLM's place, and let retries come at once."""
    patch.setattr(vllm, "ENGINE", StandInEngine())
    for task in (tasks.generate, tasks.convention, tasks.extract, tasks.train, tasks.evaluate):
        patch.setattr(task, "retry_delay_seconds", 0)  # none: Prefect then retries at once
