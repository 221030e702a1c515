"""What a round would need: samples, tokens, disk, memory, time, and what is done already."""

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from pydantic import BaseModel, ConfigDict, Field

from infra.config.round import ENGINES, RoundConfig, TargetShape
from infra.data.prompt import Prompt
from infra.disk.room import Place, Room, places, room_gate, rooms
from infra.engines.registry import find_engine, planned_version
from infra.errors import ConfigError, EngineError, EnvironmentBuildError, GateError, MissingTarget
from infra.machine.host import folder_bytes, memory_available
from infra.round.checks import draft_by_round
from infra.round.context import RoundContext
from infra.round.draft_layouts import layout_note
from infra.round.needs import (
    WINDOW_BYTES,
    asked_answers,
    draft_size,
    kept_answers,
    memory_needed,
    optimiser_steps,
    tokens_seen,
    training_disk,
)
from infra.round.rates import Rates, learnt_rates, reference_rates, work_of
from infra.round.recipe import recipe_notes
from infra.round.sampling import sampling_notes
from infra.round.status import look
from infra.steps.measure import planned_serving
from infra.store.hidden import state_bytes_per_token
from infra.units import duration, size

BF16_BYTES = 2
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
    memory_bytes: int = Field(description="Most of the host's memory that the round needs at once, bytes.")
    memory_free: int
    gpu_bytes: int = Field(default=0, description="Least memory that each GPU must have, bytes; 0: none is used.")
    seconds: float
    steps: tuple[PlannedStep, ...]
    rates: Rates
    notes: tuple[str, ...]

    @property
    def makes_draft(self) -> bool:
        """Whether a draft is trained and served; otherwise hidden states are all that is wanted."""
        return any(step.step == "draft" for step in self.steps)


def in_brief(plan: Plan) -> str:
    """What is left to do and how long it takes, in a line."""
    left = [f"{step.step} {duration(step.seconds)}" for step in plan.steps if not step.done]
    return f"about {duration(plan.seconds)} to go: {', '.join(left)}" if left else "every step is done"


def make_plan(context: RoundContext, only: Collection[str] = ()) -> Plan:
    """Plan a round without starting anything.

    Args:
        only: the steps that will run, where these are not all.

    Raises:
        ConfigError: neither the target nor its shape is known.
    """
    config, notes = context.config, list[str]()
    shape = _shape(context, notes)
    learnt = learnt_rates(context)
    once, once_tokens = _prompts(context, notes)
    kept = kept_answers(config)
    samples, prompt_tokens = round(kept * once), round(kept * once_tokens)
    learnt_answer = learnt.answer_tokens if learnt is not None else None
    answer = config.generate.expected_tokens or learnt_answer or 0.75 * config.generate.max_tokens
    answer_tokens = round(samples * answer)
    sample_tokens = (prompt_tokens + answer_tokens) / max(1, samples)
    rates = learnt or reference_rates(context.serving.device, work_of(config, shape, sample_tokens))
    if learnt is None:
        notes.append(f"times are {rates.origin}; after one round they are this machine's own")
    notes += [f"{name}: {text}" for name, tally in context.left_out.items() for text in tally.sentences()]
    tokens = prompt_tokens + answer_tokens
    token_bytes = state_bytes_per_token(config.extract.taps, shape.hidden_size)
    keys, done = _keys(context, notes)
    notes += [
        *_layouts(context, shape),
        *sampling_notes(context),
    ]
    every = _steps(context, shape, rates, keys, done, samples, prompt_tokens, answer_tokens)
    steps = [step for step in every if not only or step.step in only]
    if any(step.step == "draft" and not step.done for step in steps):
        notes += recipe_notes(config, shape, len(context.prompts), tokens)
    memory = memory_needed(config, shape, samples, *draft_size(config, shape))
    needs: dict[Place, int] = {
        "store": sum(step.store_left for step in steps),
        "scratch": sum(step.scratch_left for step in steps),
    }
    found = rooms(places(context.store, context.settings.scratch_dir), needs)
    return Plan(
        round=config.name,
        samples=samples,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        tokens=tokens,
        bytes_per_token=token_bytes,
        shards=max(1, -(-tokens * token_bytes // config.extract.shard_bytes)),
        disk_bytes=sum(step.disk_bytes for step in steps),
        disk_free=min(room.free for room in found),
        rooms=found,
        memory_bytes=memory.host,
        memory_free=memory_available(),
        gpu_bytes=memory.gpu,
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
            f"round {plan.round} needs {size(plan.disk_bytes)} of disk, its budget is {size(budget.disk_bytes)}",
            fix="raise budget.disk_bytes or lower prompts.count",
        )
    if budget.hours is not None and plan.seconds > budget.hours * 3600:
        raise GateError(
            "plan",
            f"round {plan.round} would take {plan.seconds / 3600:.1f} h, its budget is {budget.hours} h",
            fix="raise budget.hours or lower prompts.count",
        )
    if plan.memory_bytes > plan.memory_free and not all(step.done for step in plan.steps):
        raise GateError(
            "plan",
            f"round {plan.round} needs {size(plan.memory_bytes)} of memory and {size(plan.memory_free)} are free",
            fix="end what else uses memory, or lower train.sequence_tokens, extract.concurrency or prepare.max_tokens",
        )


def _shape(context: RoundContext, notes: list[str]) -> TargetShape:
    try:
        return context.target.shape
    except MissingTarget as error:
        shape = context.config.target.shape
        if shape is None:
            raise ConfigError(
                f"nothing is known of target {context.config.target.name}: {error.what}",
                fix=error.fix or "give target.shape in the round",
            ) from error
        how = "the round will fetch it" if context.config.target.fetch else error.fix
        notes.append(f"target {context.config.target.name} is not here ({how}); its shape is taken from the round")
        return shape


def _prompts(context: RoundContext, notes: list[str]) -> tuple[int, int]:
    """(samples, prompt tokens) with one answer a turn; later turns repeat what came before, so it counts with them.

    A turn whose prompt is too long is left out, and with it what follows in its conversation.
    """
    config = context.config
    answer = config.generate.expected_tokens or 0.75 * config.generate.max_tokens
    first, later = _lengths(context, notes)
    samples, total = 0, 0.0
    for prompt in context.prompts:
        length = float(first(prompt))
        for turn in ("", *prompt.turns):
            length += answer + later(turn) + TURN_TOKENS if turn else 0
            if length > config.prompts.max_prompt_tokens:
                break
            samples += 1
            total += length
    return samples, round(total)


def _lengths(context: RoundContext, notes: list[str]) -> tuple[Callable[[Prompt], int], Callable[[str], int]]:
    """(tokens of a prompt under the template, tokens of a later turn); estimated while there is no tokenizer."""
    arguments = context.config.prompts.template_args
    try:
        chat = context.chat
    except MissingTarget:
        notes.append(f"tokens of prompts are estimated ({TOKEN_BYTES} bytes each) until the tokenizer is here")

        def tokens(text: str) -> int:
            return len(text.encode()) // TOKEN_BYTES

        return lambda prompt: TEMPLATE_TOKENS + sum(tokens(message["content"]) for message in prompt.messages), tokens
    return (
        lambda prompt: len(chat.render(prompt.messages, arguments, add_generation_prompt=True)),
        lambda turn: len(chat.encode(turn)),
    )


def _keys(context: RoundContext, notes: list[str]) -> tuple[dict[str, str], set[str]]:
    try:
        return dict(context.keys.items()), look(context).done
    except (MissingTarget, EnvironmentBuildError, EngineError) as error:
        notes.append(f"keys are not known yet: {error.what}")
        return {}, set()


def _layouts(context: RoundContext, shape: TargetShape) -> Iterator[str]:
    """Which layer ids the taps are for engines with a layout of their own: in the round's version, else the newest."""
    config, target = context.config, None
    with suppress(MissingTarget):
        target = context.target
    for name in ENGINES:
        version = None
        with suppress(EngineError):  # the checks say so
            if name in config.used_engines:
                version = planned_version(name, config.engines[name].device, context.settings)
        note = layout_note(name, config.extract.taps, shape, version, draft_by_round(config, target), target)
        if note is not None:
            yield note


def _steps(
    context: RoundContext,
    shape: TargetShape,
    rates: Rates,
    keys: dict[str, str],
    done: set[str],
    samples: int,
    prompt_tokens: int,
    answer_tokens: int,
) -> list[PlannedStep]:
    config, tokens = context.config, prompt_tokens + answer_tokens
    states = tokens * state_bytes_per_token(config.extract.taps, shape.hidden_size)
    _, stored = draft_size(config, shape)
    asked = asked_answers(config)
    starts, live = planned_serving(config, answer_tokens / max(1, samples), rates.serve_tokens)
    engines = [find_engine(name) for name in ENGINES]
    titles = " and in ".join(f"{engine.title}'s" for engine in engines)
    plain = sum(engine.layout is not None and not engine.layout.embeds for engine in engines)  # without embedding
    published = BF16_BYTES * (len(engines) * stored - plain * shape.vocab_size * shape.hidden_size)
    training = training_disk(config, shape, tokens)
    checkpoints = training - BF16_BYTES * stored
    # Of the files that the engine stages, as many are there at once as there are requests in flight.
    sample = states // max(1, samples)
    staged = min(sample * min(samples, config.extract.concurrency), max(WINDOW_BYTES, sample))
    rows = (
        (
            "answers",
            rates.start_seconds + asked * answer_tokens / rates.generate_tokens,
            6 * asked * tokens,
            0,
            f"{round(asked * samples)} answers",
        ),
        ("samples", 2.0, 4 * tokens, 0, f"{tokens:,} tokens"),
        ("hidden", rates.start_seconds + tokens / rates.extract_tokens, states, 0, f"{size(states)} of states"),
        (
            "draft",
            20 + tokens_seen(config, tokens) / rates.train_tokens,
            training,
            checkpoints,
            f"{config.train.epochs} epochs, {optimiser_steps(config, tokens):,} steps, {stored / 1e6:.0f}M parameters",
        ),
        ("eval", starts * rates.start_seconds + live / rates.serve_tokens, 1 << 16, 0, f"{live:,} tokens served"),
        ("published", 2.0, published, 0, f"the draft in {titles} layout"),
        ("report", 5.0, 1 << 19, 0, "report.md and figures"),
    )
    steps = []
    for step, seconds, held, scratch, what in rows:
        key = keys.get(step)
        store_left, scratch_left = _left(context, step, key, int(held), int(scratch)) if step not in done else (0, 0)
        steps.append(
            PlannedStep(
                step=step,
                key=key,
                done=step in done,
                seconds=seconds,
                disk_bytes=int(held),
                store_left=store_left,
                scratch_left=scratch_left + (staged if step == "hidden" and step not in done else 0),
                what=what,
            )
        )
    return steps


def _left(context: RoundContext, step: str, key: str | None, held: int, scratch: int) -> tuple[int, int]:
    """(store, scratch) bytes of a step that are still to be written, what an earlier attempt wrote taken off.

    Args:
        key: the step's key; None while it is not known.
        held: bytes that the step holds in the end, in store and scratch.
        scratch: those of them that lie in scratch.
    """
    if key is None:
        return held - scratch, scratch
    stored = sum(item.size for item in context.store.list(context.rounds.step_prefix(step, key)))
    staged = folder_bytes(context.settings.scratch_dir / context.config.name / f"train-{key}") if scratch else 0
    return max(0, held - scratch - stored), max(0, scratch - staged)
