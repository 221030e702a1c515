"""A connector that gives wrong states, for the tests of the gates: it runs inside vLLM, on the server's PYTHONPATH.

The file named by ``PLANTED_FAULT`` says, at each write, what is wrong: ``swap`` exchanges the second and third slot,
``post_norm`` puts the final norm of the target in ``PLANTED_TARGET`` on the last slot, nothing leaves all as it is.
"""

import os
from pathlib import Path
from typing import Any

import torch
from eagle3_vllm.connector import CpuHiddenStatesConnector  # type: ignore[import-not-found]  # vLLM's environment has it
from safetensors import safe_open


class PlantedConnector(CpuHiddenStatesConnector):
    """As the real one, with a fault on request."""

    @staticmethod
    def _write_tensors(tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        states = tensors["hidden_states"].clone()
        fault = Path(os.environ["PLANTED_FAULT"]).read_text()
        if fault == "swap":
            states[:, [1, 2]] = states[:, [2, 1]]
        if fault == "post_norm":
            states[:, -1] = _normed(states[:, -1].float()).to(states.dtype)
        tensors = tensors | {"hidden_states": states}
        CpuHiddenStatesConnector._write_tensors(tensors, event, filename, lock_fd)


def _normed(final: torch.Tensor) -> torch.Tensor:
    with safe_open(Path(os.environ["PLANTED_TARGET"], "model.safetensors"), framework="pt") as weights:
        weight: torch.Tensor = weights.get_tensor("model.norm.weight").float()
    return final * torch.rsqrt(final.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
