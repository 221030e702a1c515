"""The norm between the last decoder layer and the head."""

from dataclasses import dataclass

import torch
from safetensors import safe_open

from infra.errors import ConfigError
from infra.targets.target import Target
from infra.targets.text import text_fields
from infra.targets.weights import NORM, find_stored

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
        self.check_invertible()
        return normed.float() / self.weight

    def check_invertible(self) -> None:
        """Raises ConfigError where a weight is zero."""
        if zeros := int((self.weight == 0).sum()):
            raise ConfigError(
                f"{zeros} weights of the target's final norm are zero: what it normed cannot be told from its output",
                expected="an engine that gives the final state before the norm",
                fix="extract with such an engine",
            )


def check_final_norm(name: str, family: str) -> None:
    """See that the final norm of a family is known here.

    Raises:
        ConfigError: it is not known to be a plain RMSNorm.
    """
    if family not in PLAIN_RMS_NORM:
        raise _unknown(name, family)


def read_final_norm(target: Target) -> FinalNorm:
    """The target's final norm, from its config and weights.

    Raises:
        ConfigError: it is not known to be a plain RMSNorm, or its weight is not in the target's files.
    """
    check_final_norm(target.name, target.shape.family)
    fields = text_fields(target.path, ("rms_norm_eps",), target.trust_remote_code)
    return FinalNorm(read_tensor(target, NORM), float(fields["rms_norm_eps"]))


def read_tensor(target: Target, names: tuple[str, ...]) -> torch.Tensor:
    """The first of the named tensors that the target's files hold, as float32.

    Raises:
        ConfigError: they hold none.
    """
    stored = find_stored(target.path, names)
    with safe_open(stored.file, framework="pt") as weights:
        tensor: torch.Tensor = weights.get_tensor(stored.name).float()
    return tensor


def _unknown(name: str, family: str) -> ConfigError:
    return ConfigError(
        f"the final norm of target {name} ({family}) is not known to be a plain RMSNorm; "
        "others, such as LayerNorm or one with weights (1 + w), have another rule",
        expected=f"one of the families {', '.join(sorted(PLAIN_RMS_NORM))}, with rms_norm_eps in config.json",
        fix="read the family's norm and add it, with its rule, to infra/targets/final_norm.py",
    )
