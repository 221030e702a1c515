"""Which GPUs a process may use, in the words of CUDA_VISIBLE_DEVICES."""

from collections.abc import Mapping, Sequence

from infra.errors import ConfigError
from infra.machine.gpus.readings import Gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"


def allowed_gpus(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> frozenset[int] | None:
    """NVML's numbers of the GPUs that an environment leaves visible; None when it does not say.

    Numbers are taken as NVML's, which CUDA's are where all cards are alike or CUDA_DEVICE_ORDER is PCI_BUS_ID.

    Raises:
        ConfigError: it names what is no GPU of this machine.
    """
    value = environ.get(VISIBLE)
    if value is None:
        return None
    found = set()
    for word in filter(None, (word.strip() for word in value.split(","))):
        if word.startswith("-"):
            break  # CUDA sees nothing from here on
        matches = [
            gpu.index
            for gpu in gpus
            if word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if len(matches) != 1:
            raise ConfigError(
                f"{VISIBLE}={value}: {word} is no GPU of this machine",
                expected=f"numbers or UUIDs of {len(gpus)} GPUs",
                fix=f"see `eagle3 gpu`, or unset {VISIBLE}",
            )
        found.add(matches[0])
    return frozenset(found)


def cuda_names(chosen: Sequence[Gpu], machine: Sequence[Gpu]) -> tuple[str, ...]:
    """Names of these GPUs for CUDA_VISIBLE_DEVICES.

    Numbers where they are safe, because engines before vLLM 0.25 understand nothing else (vllm#32569). When a GPU of
    the machine does not answer, CUDA counts without it and NVML may not: then UUIDs.
    """
    countable = all(gpu.uuid and not gpu.lost for gpu in machine)
    return tuple(str(gpu.index) if countable else gpu.uuid for gpu in chosen)


def device_environment(names: Sequence[str]) -> dict[str, str]:
    """Environment of a process that is to use these GPUs; empty when there is no choice to make."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: ",".join(names)} if names else {}
