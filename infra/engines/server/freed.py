"""Waiting until an ended server's memory is really free: a killed process can go on holding a GPU's for a while."""

import os
import time
from collections.abc import Mapping, Sequence

from infra.errors import ConfigError
from infra.machine.gpus.choice import VISIBLE, allowed_gpus
from infra.machine.gpus.readings import gpus
from infra.units import size

POLL_SECONDS = 0.5
SLACK_BYTES = 512 << 20
"""What may stay in use: other programs' allocations come and go."""


def gpu_memory(devices: Sequence[str], count: int) -> dict[int, int]:
    """Bytes in use by GPU, of those that a server gets; empty without a driver, and for MIG instances.

    Args:
        devices: which GPUs it may use, as CUDA_VISIBLE_DEVICES names them; empty for those that this process sees.
        count: how many it uses: the first ones.
    """
    machine = gpus().gpus
    names = list(devices) or [name for name in map(str.strip, os.environ.get(VISIBLE, "").split(",")) if name]
    try:
        own = [min(allowed_gpus({VISIBLE: name}, machine) or {-1}) for name in names[:count]]
    except ConfigError:
        return {}
    chosen = [gpu for gpu in machine if gpu.index in own] if names else machine[:count]
    return {gpu.index: gpu.memory_used for gpu in chosen if gpu.memory_used is not None}


def wait_freed(before: Mapping[int, int], seconds: float) -> str | None:
    """Wait until no GPU holds more than it did ``before`` a server was launched.

    Args:
        before: what :func:`gpu_memory` gave then, of the server's own GPUs; empty (on the CPU): nothing is waited for.
        seconds: longest wait.

    Returns:
        None when it is free, else which GPUs still hold how much.
    """
    deadline = time.monotonic() + seconds
    while held := _held(before):
        if time.monotonic() >= deadline:
            return "; ".join(f"GPU {index} still holds {size(more)} more" for index, more in held.items())
        time.sleep(POLL_SECONDS)
    return None


def _held(before: Mapping[int, int]) -> dict[int, int]:
    now = {gpu.index: gpu.memory_used or 0 for gpu in gpus().gpus} if before else {}
    grown = {index: now.get(index, 0) - used for index, used in before.items()}
    return {index: more for index, more in grown.items() if more > SLACK_BYTES}
