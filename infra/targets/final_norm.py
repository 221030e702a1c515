"""The norm between the last decoder layer and the head."""

from dataclasses import dataclass

import torch
from safetensors import safe_open

from infra.errors import ConfigError
from infra.targets.target import Target, weight_files
from infra.targets.text_config import text_fields

NORMS = ("model.norm.weight", "language_model.model.norm.weight")
PLAIN_RMS_NORM = frozenset(
    {
        "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss", "glm4", "glm4_moe", "deepseek_v2",
        "deepseek_v3", "kimi_k2", "kimi_k25", "minimax_m2",
    }
)  # fmt: skip
"""Families (``model_type``) whose final norm is x / sqrt(mean(x^2) + eps) * weight, read in transformers 5.12."""


@dataclass(frozen=True)
class FinalNorm:
    """A plain RMSNorm: x / sqrt(mean(x^2) + eps) * weight.

    Args:
        weight: float32 [hidden].
        eps: the target's ``rms_norm_eps``.
    """

    weight: torch.Tensor
    eps: float

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Normed states [..., hidden], float32."""
        states = states.float()
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    def unit_rms(self, normed: torch.Tensor) -> torch.Tensor:
        """What the norm turns into ``normed`` [..., hidden] and what has root mean square 1; float32.

        The norm forgets its input's length, so normed / weight stands for every input that gives ``normed``.

        Raises:
            ConfigError: a weight is zero, so that nothing gives back its component.
        """
        if zeros := int((self.weight == 0).sum()):
            raise ConfigError(
                f"{zeros} weights of the target's final norm are zero: what it normed cannot be told from its output",
                expected="an engine that gives the final state before the norm",
                fix="extract with vllm",
            )
        return normed.float() / self.weight


def read_final_norm(target: Target) -> FinalNorm:
    """The target's final norm, from its config and weights.

    Raises:
        ConfigError: it is not known to be a plain RMSNorm, or its weight is not in the target's files.
    """
    if target.shape.family not in PLAIN_RMS_NORM:
        raise ConfigError(
            f"the final norm of target {target.name} ({target.shape.family}) is not known to be a plain RMSNorm; "
            "others, such as LayerNorm or one with weights (1 + w), have another rule",
            expected=f"one of the families {', '.join(sorted(PLAIN_RMS_NORM))}",
            fix="read the family's norm and add it, with its rule, to infra/targets/final_norm.py",
        )
    epsilon = text_fields(target.path, ("rms_norm_eps",), target.trust_remote_code)["rms_norm_eps"]
    return FinalNorm(read_tensor(target, NORMS), float(epsilon))


def read_tensor(target: Target, names: tuple[str, ...]) -> torch.Tensor:
    """The first of the named tensors that the target's files hold, as float32.

    Raises:
        ConfigError: they hold none.
    """
    files = weight_files(target.path)
    for name in names:
        for path in files:
            with safe_open(path, framework="pt") as weights:
                if name in weights.keys():  # noqa: SIM118 (safe_open is no mapping)
                    tensor: torch.Tensor = weights.get_tensor(name).float()
                    return tensor
    raise ConfigError(f"target {target.name} has none of the tensors {', '.join(names)}")
