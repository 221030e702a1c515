"""How large a round's draft and its training are."""

import math

from infra.config.round import RoundConfig, TargetShape

BF16_BYTES = 2
FLOAT32_BYTES = 4


def draft_size(config: RoundConfig, shape: TargetShape) -> tuple[int, int]:
    """(trained, stored) parameters of a Llama-shaped EAGLE-3 draft, estimated from the target's width.

    The first layer's attention reads embedding and state side by side (2 x hidden); the MLP is taken as 8/3 wide.
    Embedding and head are the target's own and frozen.
    """
    vocab = config.prepare.draft_vocab_size or shape.vocab_size
    square = shape.hidden_size**2
    trained = len(config.extract.taps) * square + config.train.layers * (6 + 8) * square
    return trained, trained + (shape.vocab_size + vocab) * shape.hidden_size


def training_disk(config: RoundConfig, shape: TargetShape, tokens: int) -> int:
    """Bytes of training: a checkpoint an epoch (weights, two moments, float32), and the draft in scratch and store."""
    trained, stored = draft_size(config, shape)
    checkpoint = FLOAT32_BYTES * (stored + 2 * trained)
    return trained_epochs(config, tokens) * checkpoint + 2 * BF16_BYTES * stored


def trained_epochs(config: RoundConfig, tokens: int) -> int:
    """Epochs that are begun: ``max_steps`` may end training earlier."""
    if config.train.max_steps is None:
        return config.train.epochs
    steps = max(1, math.ceil(tokens * (1 - config.prepare.heldout) / config.train.sequence_tokens))
    return min(config.train.epochs, math.ceil(config.train.max_steps / steps))
