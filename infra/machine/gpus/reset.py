"""Resetting GPUs with nvidia-smi."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from infra.machine.gpus.readings import Gpu, nvlink_ends
from infra.machine.processes.scrub import clean_environment

AMPERE = 8
RESET_SECONDS = 180.0


def together_with(gpu: Gpu, others: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that a reset of this one must take along, itself first.

    From Ampere on a GPU with NVLinks can be reset by itself; before, every GPU that NVLinks connect with it, directly
    or by switches, must be reset in the same command (nvidia-smi's manual, --gpu-reset).
    """
    if gpu.major is None or gpu.major >= AMPERE:
        return (gpu,)
    nodes = {other.index: {other.bus, *nvlink_ends(other.index)} for other in (gpu, *others) if other.bus}
    group, reached = [gpu], nodes.pop(gpu.index, set())
    while found := [other for other in others if other.index in nodes and nodes[other.index] & reached]:
        for other in found:
            reached |= nodes.pop(other.index)
            group.append(other)
    return tuple(group)


def refusal(gpus: Sequence[Gpu]) -> str:
    """Why these cannot be reset from here, whatever the policy; empty when they can."""
    if os.geteuid() != 0:
        return "a reset takes root"
    if shutil.which("nvidia-smi") is None:
        return "there is no nvidia-smi in PATH"
    if not all(gpu.uuid for gpu in gpus):
        return "the driver does not tell its UUID"
    return ""


def reset(gpus: Sequence[Gpu]) -> str:
    """Reset these GPUs in one command; empty when nvidia-smi says that it is done, else what it says."""
    command = ["nvidia-smi", "--gpu-reset", "-i", ",".join(gpu.uuid for gpu in gpus)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=RESET_SECONDS,
            stdin=subprocess.DEVNULL,
            env=clean_environment({}),
        )
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not come back within {RESET_SECONDS:.0f} s"
    except OSError as error:
        return f"nvidia-smi could not be run: {error}"
    if done.returncode == 0:
        return ""
    said = " ".join((done.stdout + done.stderr).split())
    return said[:300] or f"nvidia-smi ended with status {done.returncode}"
