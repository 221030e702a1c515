"""The capture gate's probe: the final state must explain the engine's own next token."""

import torch
from safetensors import safe_open

from infra.config.target import Target, weight_files
from infra.engines.extraction import States
from infra.errors import ConfigError, GateError

AGREEMENT = 0.98
NEAR_TIE = 0.05
"""Two logits closer than this share of the logits' spread are a tie in bf16 and not counted."""
PROBES = 256
MINIMUM = 20

HEADS = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
NORMS = ("model.norm.weight", "language_model.model.norm.weight")


class NextTokenProbe:
    """Compares argmax(head(norm(final state of the last token))) with the token the engine went on with.

    The norm is a plain RMSNorm with the target's own weight; other norms are not known here.

    Args:
        target: its norm and head are read once, fp32 [vocab, hidden] in memory.
    """

    def __init__(self, target: Target) -> None:
        self._norm = _first_tensor(target, NORMS)
        self._head = _first_tensor(target, HEADS)
        self._agree = self._count = self._ties = 0

    def add(self, states: States) -> None:
        """Judge one sample's last position; does nothing after enough probes."""
        if self._count >= PROBES:
            return
        final = states.hidden_states[-1, -1].float()
        normed = final * torch.rsqrt(final.pow(2).mean() + 1e-6) * self._norm
        logits = self._head @ normed
        best, second = logits.topk(2).values.tolist()
        spread = float(logits.std())
        if best - second < NEAR_TIE * spread:
            self._ties += 1
            return
        self._count += 1
        self._agree += int(logits.argmax()) == states.next_token

    @property
    def agreement(self) -> float:
        """Share of the counted probes that agree; 1.0 before the first."""
        return self._agree / self._count if self._count else 1.0

    def judge(self) -> None:
        """Stop the round when too few probes agree.

        Raises:
            GateError: fewer than 98 % of at least 20 probes agree.
        """
        if self._count >= MINIMUM and self.agreement < AGREEMENT:
            raise GateError(
                "capture",
                f"the final state's logits agree with the engine's own token in {self.agreement:.1%} of "
                f"{self._count} probes ({self._ties} near-ties apart)",
                expected=f"at least {AGREEMENT:.0%}",
                fix="the final state is not the last layer's output before the norm: check the taps of this engine "
                "version, prefix caching and chunked prefill",
            )


def _first_tensor(target: Target, names: tuple[str, ...]) -> torch.Tensor:
    files = weight_files(target.path)
    for name in names:
        for path in files:
            with safe_open(path, framework="pt") as weights:
                if name in weights.keys():  # noqa: SIM118 (safe_open is no mapping)
                    tensor: torch.Tensor = weights.get_tensor(name).float()
                    return tensor
    raise ConfigError(f"target {target.name} has none of the tensors {', '.join(names)}")
