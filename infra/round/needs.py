"""What a round needs, estimated before anything starts: parameters, disk of the training, memory of host and GPUs."""

import math
from dataclasses import dataclass

from infra.config.round import RoundConfig, TargetShape
from infra.store.hidden import state_bytes_per_token

WINDOW_BYTES = 8 << 30
"""Most states of requests in flight; one sample alone may have more."""
BF16_BYTES = 2
FLOAT32_BYTES = 4
CPU_SERVER_BYTES = 4 << 30
"""A server on the CPU besides weights: runtime, activations and a 2 GiB KV cache."""
GPU_SERVER_BYTES = 2 << 30
"""A server on GPUs in the host's memory besides its workers: its front and this project's client."""
WORKER_BYTES = 3 << 30
"""A process that computes on a GPU, in the host's memory: Python, torch, CUDA's own."""
LOADER_BYTES = 512 << 20
"""A process that loads training packs."""
LOADERS = 4
"""Such processes for each GPU that trains, each with"""
PACKS = 2
"""packs ready."""
CONTEXT_BYTES = 2 << 30
"""What CUDA, kernels and graphs take of a GPU."""
TRAINED_BYTES = 4 * FLOAT32_BYTES
"""A trained parameter: itself, its gradient, two moments."""


def draft_size(config: RoundConfig, shape: TargetShape) -> tuple[int, int]:
    """(trained, stored) parameters of a Llama-shaped EAGLE-3 draft, estimated from the target's width.

    The first layer's attention reads embedding and state side by side (2 x hidden); the MLP is taken as 8/3 wide.
    Embedding and head are the target's own and frozen.
    """
    vocab = config.prepare.draft_vocab_size or shape.vocab_size
    square = shape.hidden_size**2
    trained = len(config.extract.taps) * square + config.train.layers * (6 + 8) * square
    return trained, trained + (shape.vocab_size + vocab) * shape.hidden_size


def kept_answers(config: RoundConfig) -> float:
    """Answers to a prompt that become samples, on average: of a held-out prompt the first one alone does."""
    return trained_answers(config) + config.prepare.heldout


def trained_answers(config: RoundConfig) -> float:
    """Answers to a prompt that are trained on, on average."""
    return config.generate.answers_each * (1 - config.prepare.heldout)


def asked_answers(config: RoundConfig) -> float:
    """Answers that are asked for each sample."""
    return config.generate.answers_each / kept_answers(config)


def training_tokens(config: RoundConfig, tokens: int) -> int:
    """Those of the samples' tokens that are trained on, once each."""
    return round(tokens * trained_answers(config) / kept_answers(config))


def steps_an_epoch(config: RoundConfig, tokens: int) -> int:
    """Optimiser steps of one pass over the training samples, at least: each device takes one pack a step.

    Args:
        tokens: of all samples, held-out ones too.
    """
    return max(1, math.ceil(training_tokens(config, tokens) / (config.train.sequence_tokens * config.train.devices)))


def optimiser_steps(config: RoundConfig, tokens: int) -> int:
    """Optimiser steps of the whole training; ``max_steps`` may end it earlier."""
    steps = config.train.epochs * steps_an_epoch(config, tokens)
    return min(steps, config.train.max_steps or steps)


def tokens_seen(config: RoundConfig, tokens: int) -> int:
    """Tokens that the training goes through, every epoch counted."""
    a_step = config.train.sequence_tokens * config.train.devices
    seen = config.train.epochs * training_tokens(config, tokens)
    return min(seen, config.train.max_steps * a_step) if config.train.max_steps is not None else seen


def training_disk(config: RoundConfig, shape: TargetShape, tokens: int) -> int:
    """Bytes of training: a checkpoint an epoch (weights, two moments, float32), and the draft in scratch and store.

    A draft to start from is written once more, in float32.
    """
    trained, stored = draft_size(config, shape)
    checkpoint = FLOAT32_BYTES * (stored + 2 * trained)
    begun_with = FLOAT32_BYTES * stored if config.train.start else 0
    return trained_epochs(config, tokens) * checkpoint + begun_with + 2 * BF16_BYTES * stored


def trained_epochs(config: RoundConfig, tokens: int) -> int:
    """Epochs that are begun."""
    return math.ceil(optimiser_steps(config, tokens) / steps_an_epoch(config, tokens))


@dataclass(frozen=True)
class Memory:
    """What the round needs at its widest moment, bytes.

    Args:
        host: of the host's memory.
        gpu: of each GPU, at least; 0 where none is used. What an engine adds for its cache is its own choice.
    """

    host: int
    gpu: int


def memory_needed(config: RoundConfig, shape: TargetShape, samples: int, trained: int, stored: int) -> Memory:
    """The wider of extraction and training; they do not run together.

    Args:
        samples: how many there are.
        trained: parameters of the draft that are trained.
        stored: all parameters of the draft.
    """
    used = [config.engines[name] for name in config.used_engines]
    on_cpu = [engine for engine in used if engine.device == "cpu"]
    on_gpus = [engine.tensor_parallel for engine in used if engine.device == "cuda"]
    servers = [2 * shape.weight_bytes + CPU_SERVER_BYTES] if on_cpu else []
    if on_gpus:
        # While it is loaded, a layer is there as it was read and as it is used.
        layers = max(on_gpus) * (WORKER_BYTES + 2 * shape.weight_bytes // shape.layers // min(on_gpus))
        servers.append(GPU_SERVER_BYTES + layers)
    extracting = max(servers) + extraction_window(config, shape, samples)
    trains_on_gpus = config.engines[config.extract.engine].device == "cuda"
    host = max(extracting, _trainer(config, shape, trained, stored, trains_on_gpus))
    if not on_gpus:
        return Memory(host, 0)
    target = shape.weight_bytes // min(on_gpus) + CONTEXT_BYTES
    return Memory(host, max(target, _training_gpu(config, shape, trained, stored) if trains_on_gpus else 0))


def longest_sample(config: RoundConfig) -> int:
    """Most tokens that a sample may have."""
    if config.generate.answers == "given":
        return config.prepare.max_tokens
    return min(config.prepare.max_tokens, config.prompts.max_prompt_tokens + config.generate.max_tokens)


def extraction_window(config: RoundConfig, shape: TargetShape, samples: int) -> int:
    """Hidden states in memory at once, bytes.

    Those of the requests in flight, in the engine's files, and two objects that a bucket waits for.
    """
    token = state_bytes_per_token(config.extract.taps, shape.hidden_size)
    # A float32 file, and its rounded copy.
    wide = 3 if config.engines[config.extract.engine].dtype == "float32" else 1
    sample = longest_sample(config) * token
    flying = min(min(config.extract.concurrency, samples) * sample, max(WINDOW_BYTES, sample))
    return wide * flying + 2 * min(config.extract.object_bytes, config.extract.shard_bytes)


def _trainer(config: RoundConfig, shape: TargetShape, trained: int, stored: int, on_gpus: bool) -> int:
    if not on_gpus:
        return WORKER_BYTES + TRAINED_BYTES * trained + FLOAT32_BYTES * (stored - trained)
    pack = config.train.sequence_tokens * state_bytes_per_token(config.extract.taps, shape.hidden_size)
    checkpoint = FLOAT32_BYTES * (stored + 2 * trained)
    return config.train.devices * (WORKER_BYTES + LOADERS * (LOADER_BYTES + PACKS * pack)) + checkpoint


def _training_gpu(config: RoundConfig, shape: TargetShape, trained: int, stored: int) -> int:
    """Draft, optimiser, and for each draft step the logits over the draft vocabulary with their gradient."""
    vocab = config.prepare.draft_vocab_size or shape.vocab_size
    logits = 2 * FLOAT32_BYTES * config.train.sequence_tokens * vocab * config.train.draft_steps
    return CONTEXT_BYTES + TRAINED_BYTES * trained + BF16_BYTES * (stored - trained) + logits
