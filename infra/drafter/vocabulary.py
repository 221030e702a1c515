"""Which target tokens a draft can propose."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infra.errors import TrainingError
from infra.store.samples import Sample


@dataclass(frozen=True)
class Vocabulary:
    """A draft's vocabulary.

    Args:
        token_ids: int64 [draft vocabulary], ascending target ids.
        target_size: size of the target's vocabulary.
        coverage: share of the supervised training tokens that the draft can propose.
    """

    token_ids: NDArray[np.int64]
    target_size: int
    coverage: float

    @property
    def size(self) -> int:
        """Number of tokens the draft can propose."""
        return len(self.token_ids)

    @property
    def d2t(self) -> NDArray[np.int64]:
        """int64 [draft vocabulary]: target id minus draft id."""
        return self.token_ids - np.arange(self.size, dtype=np.int64)

    @property
    def t2d(self) -> NDArray[np.bool_]:
        """bool [target vocabulary]: whether the draft can propose the token."""
        mask: NDArray[np.bool_] = np.zeros(self.target_size, dtype=np.bool_)
        mask[self.token_ids] = True
        return mask

    def save(self, folder: Path) -> None:
        """Write ``d2t-<size>.npy`` and ``t2d-<size>.npy``, where speculators' trainer looks for them."""
        np.save(folder / f"d2t-{self.size}.npy", self.d2t)
        np.save(folder / f"t2d-{self.size}.npy", self.t2d)


def token_frequencies(samples: Iterable[Sample]) -> Counter[int]:
    """How often each token id is supervised in the training samples (held-out ones are not looked at)."""
    counts: Counter[int] = Counter()
    for sample in samples:
        if sample.split == "train":
            counts.update(compress(sample.input_ids, sample.loss_mask))
    return counts


def choose_vocabulary(frequencies: Mapping[int, int], size: int | None, target_size: int) -> Vocabulary | None:
    """The ``size`` most frequent tokens (ties: lower id first, then unseen low ids); None for the whole vocabulary.

    Raises:
        TrainingError: there are no frequencies to choose by, or they name ids that the target does not have.
    """
    if size is None or size >= target_size:
        return None
    if not frequencies:
        raise TrainingError(
            f"a draft vocabulary of {size} tokens was asked for but no token is supervised",
            expected="training samples with a loss mask",
        )
    if max(frequencies) >= target_size or min(frequencies) < 0:
        raise TrainingError(
            f"token ids up to {max(frequencies)} do not fit the target's vocabulary of {target_size}",
            fix="use samples that were made with this target",
        )
    chosen = sorted(frequencies, key=lambda token: (-frequencies[token], token))[:size]
    seen = set(chosen)
    unseen = (token for token in range(target_size) if token not in seen)
    chosen += [next(unseen) for _ in range(size - len(chosen))]
    return given_vocabulary(sorted(chosen), frequencies, target_size)


def given_vocabulary(token_ids: Sequence[int], frequencies: Mapping[int, int], target_size: int) -> Vocabulary:
    """A vocabulary of these ascending target ids."""
    covered = sum(frequencies.get(token, 0) for token in token_ids)
    return Vocabulary(np.array(token_ids, dtype=np.int64), target_size, covered / max(1, sum(frequencies.values())))
