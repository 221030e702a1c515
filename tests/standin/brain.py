"""What the stand-in thinks: states, next tokens and answers as pure functions of token ids (numpy only)."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

MEMORY = (1.0, 0.5, 0.25)
"""Weights of a token and of those before it in the state of a position."""
LONGEST = 16
"""Tokens of the longest answer, its end token included: the stand-in comes to an end."""

Floats = NDArray[np.float32]


class Brain:
    """A target without layers: the state of a position is a weighted sum of random rows of its last tokens.

    Each tap has rows of its own, and tap L goes through the target's own norm and head, so the capture gate's probe
    finds the very token that the stand-in goes on with.

    Args:
        target: folder with config.json and weights in float32.
        taps: taps to give, ascending; tap L is added.
    """

    def __init__(self, target: Path, taps: Sequence[int]) -> None:
        config = json.loads((target / "config.json").read_text())
        self.end = int(config["eos_token_id"])
        with safe_open(target / "model.safetensors", framework="numpy") as weights:
            self._head, self._norm = weights.get_tensor("lm_head.weight"), weights.get_tensor("model.norm.weight")
        vocabulary, hidden = self._head.shape
        self._rows = [
            np.random.default_rng(tap).standard_normal((vocabulary, hidden)).astype(np.float32)
            for tap in (*taps, config["num_hidden_layers"])
        ]

    def states(self, tokens: Sequence[int]) -> Floats:
        """float32 [tokens, taps + 1, hidden], every value one that bfloat16 can hold."""
        return np.stack([self._slot(rows, np.array(tokens)) for rows in self._rows], axis=1)

    def next_token(self, tokens: Sequence[int]) -> int:
        """The token that the last position's final state leads to."""
        final = self._slot(self._rows[-1], np.array(tokens[-len(MEMORY) :]))[-1]
        normed = final / np.sqrt(np.mean(final**2) + 1e-6) * self._norm
        return int(np.argmax(self._head @ normed))

    def answer(self, prompt: Sequence[int], limit: int) -> tuple[list[int], str]:
        """(tokens, finish reason) of the greedy answer, which ends after :data:`LONGEST` tokens."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + limit:
            tokens.append(self.end if len(tokens) == len(prompt) + LONGEST - 1 else self.next_token(tokens))
            if tokens[-1] == self.end:
                return tokens[len(prompt) :], "stop"
        return tokens[len(prompt) :], "length"

    @staticmethod
    def _slot(rows: Floats, tokens: NDArray[np.int64]) -> Floats:
        state = np.zeros((len(tokens), rows.shape[1]), dtype=np.float32)
        for age, weight in enumerate(MEMORY[: len(tokens)]):
            state[age:] += np.float32(weight) * rows[tokens[: len(tokens) - age]]
        return (state.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def digest(tokens: Sequence[int]) -> int:
    """A number that only the token ids decide."""
    return int.from_bytes(hashlib.sha256(json.dumps(list(tokens)).encode()).digest()[:8], "little")
