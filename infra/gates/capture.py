"""The capture gate's probe: the final state must explain the engine's own next token."""

import torch

from infra.engines.client.extraction import States
from infra.errors import GateError
from infra.targets.final_norm import read_final_norm, read_tensor
from infra.targets.target import Target
from infra.targets.weights import HEAD

AGREEMENT = 0.98
NEAR_TIE = 0.05
"""Two logits closer than this share of the logits' spread are a tie in bf16 and not counted."""
PROBES = 256
MINIMUM = 20


class Head:
    """The target's final norm and head, float32 in memory.

    Final states of either kind (``pre_norm``, ``unit_rms``) come out the same after the norm, because it is free of
    scale.
    """

    def __init__(self, target: Target) -> None:
        self._norm = read_final_norm(target)
        self._head = read_tensor(target, HEAD)

    def normed(self, final: torch.Tensor) -> torch.Tensor:
        """Final states [..., hidden] after the norm, float32."""
        return self._norm(final)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab], float32, of normed states."""
        return normed @ self._head.T


def near_ties(logits: torch.Tensor) -> torch.Tensor:
    """Where the two best of logits [..., vocab] are too close for their order to mean anything; bool [...]."""
    best, second = logits.topk(2, dim=-1).values.unbind(-1)
    return best - second < NEAR_TIE * logits.std(dim=-1)


class NextTokenProbe:
    """Compares argmax(head(norm(final state of the last token))) with the token the engine went on with."""

    def __init__(self, target: Target) -> None:
        self._head = Head(target)
        self._agree = self._count = self._ties = 0

    def add(self, states: States) -> None:
        """Judge one sample's last position; does nothing after enough probes."""
        if self._count >= PROBES:
            return
        logits = self._head.logits(self._head.normed(states.hidden_states[-1, -1]))
        if bool(near_ties(logits)):
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
