"""What vLLM cannot do of what is asked of it."""

from infra.engines.engine import Limit, Use
from infra.engines.limits import LATENT_ATTENTION

WRAPPERS = frozenset({"mistral3", "kimi_k25"})
"""Classes that are ``SupportsEagle3`` (read in 0.32.0)."""


def captures_no_latent_attention(use: Use) -> str | None:
    """Its connector looks for key-value groups that latent attention does not have (read in 0.32.0)."""
    if use.captures and use.shape.family in LATENT_ATTENTION:
        return (
            f"vLLM cannot extract hidden states of the {use.shape.family} target {use.name}: its connector does not "
            "support targets with latent attention (read in 0.32.0). To mend it: extract and serve with sglang"
        )
    return None


def context(use: Use) -> str | None:
    """It serves no more than the target's own context (``_get_and_verify_max_len``, 0.32.0)."""
    longest = getattr(use.text, "max_position_embeddings", None)
    overruled = any("VLLM_ALLOW_LONG_MAX_MODEL_LEN" in rung.env for rung in use.config.ladder)
    if not longest or overruled:
        return None
    rope = getattr(use.text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("linear", "dynamic", "ntk"):
        longest = int(longest * (rope.get("factor") or 1.0))
    longest = max(longest, getattr(use.text, "model_max_length", None) or 0)
    if use.config.max_model_len <= longest:
        return None
    return (
        f"engines.vllm.max_model_len is {use.config.max_model_len}, and {use.name} takes {longest} tokens "
        f"(max_position_embeddings). To mend it: set it to {longest} at most"
    )


LIMITS: tuple[Limit, ...] = (captures_no_latent_attention, context)
