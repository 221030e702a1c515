"""The capture gate's probe: the final state must explain the engine's own next token."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from infra.errors import GateError
from infra.targets.final_norm import read_final_norm, read_tensor
from infra.targets.target import Target
from infra.targets.weights import HEAD

AGREEMENT = 0.98
NEAR_TIE = 0.05
"""Two logits closer than this share of the logits' spread are a tie in bf16 and not counted."""
PROBES = 256
BATCH = 16
BEHIND = 2
"""Most batches under way when a shard is committed."""
MINIMUM = 20


@dataclass(frozen=True)
class Ending:
    """What a probe looks at.

    Attributes:
        final: the final state of a sample's last token, [hidden].
        next_token: the token that the engine, greedy, went on with.
    """

    final: torch.Tensor
    next_token: int


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
    """Compares argmax(head(norm(final state of the last token))) with the token the engine went on with.

    The first samples are probed, and one of each shard from then on, in batches, by a thread of its own: the head is
    read once a batch.
    """

    def __init__(self, target: Target) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="probe")
        self._head: Future[Head] = self._thread.submit(Head, target)
        self._batch: list[Ending] = []
        self._running: deque[Future[None]] = deque()
        self._taken = self._agree = self._count = self._ties = 0

    def add(self, ending: Ending, first_of_shard: bool) -> None:
        """Take one sample's ending; does nothing with most, after enough probes."""
        if self._taken >= PROBES and not first_of_shard:
            return
        self._taken += 1
        self._batch.append(ending)
        if len(self._batch) >= BATCH:
            self._send()

    def _send(self) -> None:
        if self._batch:
            self._running.append(self._thread.submit(self._measure, self._batch))
            self._batch = []

    def _measure(self, endings: list[Ending]) -> None:
        head = self._head.result()
        logits = head.logits(head.normed(torch.stack([ending.final for ending in endings])))
        counted = ~near_ties(logits)
        agree = logits.argmax(dim=-1) == torch.tensor([ending.next_token for ending in endings])
        self._count += int(counted.sum())
        self._agree += int((counted & agree).sum())
        self._ties += int((~counted).sum())

    def close(self) -> None:
        """End the thread; probes that it has not come to are given up."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def agreement(self) -> float:
        """Share of the counted probes that agree; 1.0 before the first."""
        return self._agree / self._count if self._count else 1.0

    def judge(self, whole: bool) -> None:
        """Stop the round when too few probes agree.

        Args:
            whole: wait for every probe that was taken; else two batches may be under way.

        Raises:
            GateError: fewer than 98 % of at least 20 probes agree.
            ConfigError: the target's norm or head cannot be used.
        """
        if whole:
            self._send()
        while self._running and (whole or len(self._running) > BEHIND or self._running[0].done()):
            self._running.popleft().result()
        if self._count >= MINIMUM and self.agreement < AGREEMENT:
            raise GateError(
                "capture",
                f"the final state's logits agree with the engine's own token in {self.agreement:.1%} of "
                f"{self._count} probes ({self._ties} near-ties apart)",
                expected=f"at least {AGREEMENT:.0%}",
                fix="the final state is not the last layer's output before the norm: check the taps of this engine "
                "version, prefix caching and chunked prefill",
            )
