"""What SGLang cannot do of what is asked of it."""

from infra.engines.engine import Limit, Use
from infra.engines.limits import LATENT_ATTENTION
from infra.errors import ConfigError
from infra.targets.final_norm import read_final_norm

WRAPPERS = frozenset({"kimi_k25"})
"""Classes with ``set_eagle3_layers_to_capture`` (read in 0.5.14 and 0.5.23)."""


def final_norm(use: Use) -> str | None:
    """It gives the final state after the norm only, from which the state before is told by dividing."""
    if not use.captures or use.target is None:
        return None
    try:
        read_final_norm(use.target).check_invertible()
    except ConfigError as error:
        return str(error)
    return None


def cpu_latent_attention(use: Use) -> str | None:
    """Its kernels for latent attention want AMX or a GPU (run, 0.5.23)."""
    if use.config.device == "cpu" and use.shape.family in LATENT_ATTENTION:
        return f"SGLang cannot serve the {use.shape.family} target {use.name} on a CPU. To mend it: use a GPU"
    return None


def cpu_tensor_parallel(use: Use) -> str | None:
    """Its CPU engine runs in one process here (run, 0.5.23)."""
    if use.config.device == "cpu" and use.config.tensor_parallel > 1:
        return "SGLang cannot split a target over several CPUs. To mend it: set engines.sglang.tensor_parallel to 1"
    return None


def cpu_draft(use: Use) -> str | None:
    """The kernels that verify drafts are in no wheel (read in 0.5.23)."""
    if use.config.device == "cpu" and use.drafts:
        return (
            "SGLang cannot serve an EAGLE-3 draft on the CPU (its draft backend wants kernels that no wheel has). "
            "To mend it: set serve_with: vllm, or engines.sglang.device: cuda"
        )
    return None


LIMITS: tuple[Limit, ...] = (final_norm, cpu_latent_attention, cpu_tensor_parallel, cpu_draft)
