"""What a round would need: samples, tokens, disk, memory, time, and what is done already."""

import math
from collections.abc import Callable, Collection
from contextlib import suppress

from pydantic import BaseModel, ConfigDict, Field

from infra.config.round import RoundConfig, TargetShape
from infra.data.prompt import Prompt
from infra.disk.rooms import Room, left, room_gate, rooms
from infra.engines.registry import planned_version
from infra.errors import ConfigError, EngineError, EnvironmentBuildError, GateError, MissingTarget
from infra.machine.host import memory_available
from infra.progress import gib
from infra.round.checks import draft_by_round
from infra.round.context import Round
from infra.round.layouts import layout_note
from infra.round.ledger import done_steps
from infra.round.rates import Rates, learnt_rates, reference_rates
from infra.store.hidden import state_bytes_per_token

BF16_BYTES = 2
FLOAT32_BYTES = 4
TURN_TOKENS = 8
"""What a chat template puts around one more turn, tokens."""

TEMPLATE_TOKENS = 30
TOKEN_BYTES = 4
"""A prompt's template (with a default system message) and text, while the target's tokenizer is not at hand."""


class PlannedStep(BaseModel):
    """One step of the plan."""

    model_config = ConfigDict(frozen=True)

    step: str
    key: str | None = Field(description="None while the target's revision or an engine's version is unknown.")
    done: bool
    seconds: float
    disk_bytes: int
    store_left: int = Field(description="Bytes still to be written to the store.")
    scratch_left: int = Field(description="Bytes still to be written to scratch, staging included.")
    what: str


class Plan(BaseModel):
    """The plan of a round."""

    model_config = ConfigDict(frozen=True)

    round: str
    samples: int
    prompt_tokens: int
    answer_tokens: int
    tokens: int
    bytes_per_token: int
    shards: int
    disk_bytes: int = Field(description="Most the round holds at once, in store and scratch, bytes.")
    disk_free: int
    rooms: tuple[Room, ...] = Field(description="What is still to be written, by file system.")
    memory_bytes: int
    memory_free: int
    seconds: float
    steps: tuple[PlannedStep, ...]
    rates: Rates
    notes: tuple[str, ...]

    @property
    def makes_draft(self) -> bool:
        """Whether a draft is trained and served; otherwise hidden states are all that is wanted."""
        return any(step.step == "draft" for step in self.steps)


def make_plan(round_: Round, only: Collection[str] = ()) -> Plan:
    """Plan a round without starting anything.

    Args:
        only: the steps that will run, where these are not all.

    Raises:
        ConfigError: neither the target nor its shape is known.
    """
    config, notes = round_.config, list[str]()
    shape = _shape(round_, notes)
    learnt = learnt_rates(round_)
    parameters = shape.weight_bytes / BF16_BYTES
    rates = learnt or reference_rates(round_.serving.device, parameters, round_.serving.tensor_parallel)
    if learnt is None:
        notes.append(f"times are {rates.origin}; after one round they are this machine's own")
    samples, prompt_tokens = _prompts(round_, notes)
    answer = config.generate.expected_tokens or rates.answer_tokens or 0.75 * config.generate.max_tokens
    answer_tokens = round(samples * answer)
    tokens = prompt_tokens + answer_tokens
    size = state_bytes_per_token(config.extract.taps, shape.hidden_size)
    keys, done = _keys(round_, notes)
    notes.append(_layouts(round_, shape))
    every = _steps(round_, shape, rates, keys, done, samples, prompt_tokens, answer_tokens)
    steps = [step for step in every if not only or step.step in only]
    found = rooms(round_, sum(step.store_left for step in steps), sum(step.scratch_left for step in steps))
    return Plan(
        round=config.name,
        samples=samples,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        tokens=tokens,
        bytes_per_token=size,
        shards=max(1, -(-tokens * size // config.extract.shard_bytes)),
        disk_bytes=sum(step.disk_bytes for step in steps),
        disk_free=min(room.free for room in found),
        rooms=found,
        memory_bytes=_memory(round_, shape),
        memory_free=memory_available(),
        seconds=sum(step.seconds for step in steps if not step.done),
        steps=tuple(steps),
        rates=rates,
        notes=tuple(notes),
    )


def plan_gate(config: RoundConfig, plan: Plan) -> None:
    """Stop a round that does not fit.

    Raises:
        GateError: more disk, memory or time is needed than there is or than the budget allows.
    """
    budget = config.budget
    room_gate(plan.round, plan.rooms, budget.free_bytes)
    if budget.disk_bytes is not None and plan.disk_bytes > budget.disk_bytes:
        raise GateError(
            "plan",
            f"round {plan.round} needs {gib(plan.disk_bytes)} of disk, its budget is {gib(budget.disk_bytes)}",
            fix="raise budget.disk_bytes or lower prompts.count",
        )
    if budget.hours is not None and plan.seconds > budget.hours * 3600:
        raise GateError(
            "plan",
            f"round {plan.round} would take {plan.seconds / 3600:.1f} h, its budget is {budget.hours} h",
            fix="raise budget.hours or lower prompts.count",
        )
    uses_cpu = any(config.engines[name].device == "cpu" for name in config.used_engines)
    if uses_cpu and plan.memory_bytes > plan.memory_free:
        raise GateError(
            "plan",
            f"round {plan.round} needs {gib(plan.memory_bytes)} of memory and {gib(plan.memory_free)} are free",
            fix="end what else uses memory",
        )


def draft_parameters(shape: TargetShape, taps: int, layers: int, draft_vocab: int) -> tuple[int, int]:
    """(trained, stored) parameters of a Llama-shaped EAGLE-3 draft, estimated from the target's width.

    The first layer's attention reads embedding and state side by side (2 x hidden); the MLP is taken as 8/3 wide.
    Embedding and head are the target's own and frozen.
    """
    square = shape.hidden_size**2
    trained = taps * square + layers * (6 + 8) * square
    return trained, trained + (shape.vocab_size + draft_vocab) * shape.hidden_size


def training_disk(config: RoundConfig, shape: TargetShape, tokens: int) -> int:
    """Bytes of training: a checkpoint an epoch (weights, two moments, float32), and the draft in scratch and store."""
    vocab = config.prepare.draft_vocab_size or shape.vocab_size
    trained, stored = draft_parameters(shape, len(config.extract.taps), config.train.layers, vocab)
    checkpoint = FLOAT32_BYTES * (stored + 2 * trained)
    return trained_epochs(config, tokens) * checkpoint + 2 * BF16_BYTES * stored


def trained_epochs(config: RoundConfig, tokens: int) -> int:
    """Epochs that are begun: ``max_steps`` may end training earlier."""
    if config.train.max_steps is None:
        return config.train.epochs
    steps = max(1, math.ceil(tokens * (1 - config.prepare.heldout) / config.train.sequence_tokens))
    return min(config.train.epochs, math.ceil(config.train.max_steps / steps))


def _shape(round_: Round, notes: list[str]) -> TargetShape:
    try:
        return round_.target.shape
    except MissingTarget as error:
        shape = round_.config.target.shape
        if shape is None:
            raise ConfigError(
                f"nothing is known of target {round_.config.target.name}: {error.what}",
                fix=error.fix or "give target.shape in the round",
            ) from error
        how = "the round will fetch it" if round_.config.target.fetch else error.fix
        notes.append(f"target {round_.config.target.name} is not here ({how}); its shape is taken from the round")
        return shape


def _prompts(round_: Round, notes: list[str]) -> tuple[int, int]:
    """(samples, prompt tokens); later turns repeat the conversation, so they count with what came before.

    A turn whose prompt is too long is left out, and with it what follows in its conversation.
    """
    config = round_.config
    answer = config.generate.expected_tokens or 0.75 * config.generate.max_tokens
    first, later = _lengths(round_, notes)
    samples, total = 0, 0.0
    for prompt in round_.prompts:
        length = float(first(prompt))
        for turn in ("", *prompt.turns):
            length += answer + later(turn) + TURN_TOKENS if turn else 0
            if length > config.prompts.max_prompt_tokens:
                break
            samples += 1
            total += length
    return samples, round(total)


def _lengths(round_: Round, notes: list[str]) -> tuple[Callable[[Prompt], int], Callable[[str], int]]:
    """(tokens of a prompt under the template, tokens of a later turn); estimated while there is no tokenizer."""
    arguments = round_.config.prompts.template_args
    try:
        chat = round_.chat
    except MissingTarget:
        notes.append(f"tokens of prompts are estimated ({TOKEN_BYTES} bytes each) until the tokenizer is here")

        def tokens(text: str) -> int:
            return len(text.encode()) // TOKEN_BYTES

        return lambda prompt: TEMPLATE_TOKENS + sum(tokens(message["content"]) for message in prompt.messages), tokens
    return (
        lambda prompt: len(chat.render(prompt.messages, arguments, add_generation_prompt=True)),
        lambda turn: len(chat.encode(turn)),
    )


def _keys(round_: Round, notes: list[str]) -> tuple[dict[str, str], set[str]]:
    try:
        return dict(round_.keys.items()), done_steps(round_)
    except (MissingTarget, EnvironmentBuildError, EngineError) as error:
        notes.append(f"keys are not known yet: {error.what}")
        return {}, set()


def _layouts(round_: Round, shape: TargetShape) -> str:
    """Which layer ids the taps are for SGLang, by the version that the round uses, else the newest one known."""
    config, version = round_.config, None
    with suppress(EngineError):  # the checks say so
        if "sglang" in config.used_engines:
            version = planned_version("sglang", config.engines["sglang"].device, round_.settings)
    target = None
    with suppress(MissingTarget):
        target = round_.target
    return layout_note(config.extract.taps, shape, version, draft_by_round(config, target), target)


def _steps(
    round_: Round,
    shape: TargetShape,
    rates: Rates,
    keys: dict[str, str],
    done: set[str],
    samples: int,
    prompt_tokens: int,
    answer_tokens: int,
) -> list[PlannedStep]:
    config, tokens = round_.config, prompt_tokens + answer_tokens
    states = tokens * state_bytes_per_token(config.extract.taps, shape.hidden_size)
    vocab = config.prepare.draft_vocab_size or shape.vocab_size
    _, stored = draft_parameters(shape, len(config.extract.taps), config.train.layers, vocab)
    train_tokens = tokens * (1 - config.prepare.heldout) * config.train.epochs
    if config.train.max_steps is not None:
        train_tokens = min(train_tokens, config.train.max_steps * config.train.sequence_tokens)
    live = 2 * config.evaluate.max_tokens * config.evaluate.prompts.count * len(config.evaluate.concurrencies)
    live += 2 * answer_tokens // max(1, samples) * config.evaluate.heldout_count
    published = BF16_BYTES * (2 * stored - shape.vocab_size * shape.hidden_size)  # SGLang's is without the embedding
    training = training_disk(config, shape, tokens)
    checkpoints = training - BF16_BYTES * stored
    # Of the files that the engine stages, as many are there at once as there are requests in flight.
    staged = states // max(1, samples) * min(samples, config.extract.concurrency)
    rows = (
        ("answers", rates.start_seconds + answer_tokens / rates.generate_tokens, 6 * tokens, 0, f"{samples} answers"),
        ("samples", 2.0, 4 * tokens, 0, f"{tokens:,} tokens"),
        ("hidden", rates.start_seconds + tokens / rates.extract_tokens, states, 0, f"{gib(states)} of states"),
        (
            "draft",
            20 + train_tokens / rates.train_tokens,
            training,
            checkpoints,
            f"{config.train.epochs} epochs, {stored / 1e6:.0f}M parameters",
        ),
        ("eval", 1.5 * rates.start_seconds + live / rates.serve_tokens, 1 << 16, 0, f"{live:,} tokens served"),
        ("published", 2.0, published, 0, "the draft in vLLM's and in SGLang's layout"),
        ("report", 5.0, 1 << 19, 0, "report.md and figures"),
    )
    steps = []
    for step, seconds, size, scratch, what in rows:
        key = keys.get(step)
        store_left, scratch_left = left(round_, step, key, int(size), int(scratch)) if step not in done else (0, 0)
        steps.append(
            PlannedStep(
                step=step,
                key=key,
                done=step in done,
                seconds=seconds,
                disk_bytes=int(size),
                store_left=store_left,
                scratch_left=scratch_left + (staged if step == "hidden" and step not in done else 0),
                what=what,
            )
        )
    return steps


def _memory(round_: Round, shape: TargetShape) -> int:
    if round_.serving.device != "cpu":
        return 8 << 30
    return 2 * shape.weight_bytes + (4 << 30)
