"""The generate step: the target answers the prompts, or the answers that the data has are taken."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from infra.data.build import TOO_LONG
from infra.data.gate import template_gate
from infra.data.masks import given_answers
from infra.data.prompt import Message, Prompt
from infra.engines.client.client import Client, RequestRefused, Sampling
from infra.engines.client.flights import Flights
from infra.engines.client.pool import run_pool
from infra.errors import DiskFull, EngineError
from infra.progress import Meter, OnProgress
from infra.round.context import RoundContext
from infra.store.answers import Answer, AnswerLog, Status
from infra.store.sample_ids import SampleId

ANSWER_TOKEN_BYTES = 12
"""What a token of an answer takes in the journal or the store, its share of the conversation's text included."""
TEMPLATE_PROBES = 4
COMMIT_EVERY = 256
QUARANTINED = "quarantined"
"""Reason of an answer that is not asked for (again), since the engine dies on it."""
Keep = Callable[[Answer], bool]


def journal_path(context: RoundContext) -> Path:
    """Local journal of answers that are not in the store yet."""
    return context.scratch / f"answers-{context.keys.answers}.jsonl"


@dataclass(frozen=True)
class Asking:
    """Whom the answers are asked of.

    Args:
        client: the target's server.
        flights: where requests to it are told.
        quarantined: ids of samples that are not to be asked.
    """

    client: Client
    flights: Flights
    quarantined: Collection[str] = ()


@dataclass(frozen=True)
class Talk:
    """One conversation of the target with a prompt.

    Args:
        prompt: the prompt, with the turns that follow.
        answer: which of the answers to it this conversation begins with, from 0.
    """

    prompt: Prompt
    answer: int

    @property
    def turns(self) -> int:
        """How many answers it has."""
        return 1 + len(self.prompt.turns)

    def sample(self, turn: int) -> str:
        """Id of the sample that one of its turns becomes."""
        return str(SampleId(self.prompt.id, turn, self.answer))

    @property
    def samples(self) -> list[str]:
        """Ids of the samples of all its turns, in order."""
        return [self.sample(turn) for turn in range(self.turns)]


def talks(context: RoundContext) -> list[Talk]:
    """Every conversation that the round asks for; those that begin with one prompt follow one another."""
    each = context.config.generate.answers_each
    return [Talk(prompt, answer) for prompt in context.prompts for answer in range(each)]


def answers_wanted(context: RoundContext) -> int:
    """How many answers the round asks for: one a turn of each conversation."""
    return sum(talk.turns for talk in talks(context))


def answers_kept(context: RoundContext) -> Counter[str]:
    """How many answers of this round's key are there, committed or in the journal, by why they ended."""
    with _open_log(context) as log:
        return log.finish_reasons()


def generate(context: RoundContext, asking: Asking | None, on_progress: OnProgress | None = None) -> None:
    """Bring the answers of this round's key to completion.

    Args:
        asking: the target's server; None when the data has answers of its own.

    Raises:
        EngineError: the server stopped answering; everything answered so far is kept.
        GateError: template and engine tokenise differently.
    """
    with _open_log(context) as log:
        if asking is None:
            for number, answer in enumerate(_given(context, log), 1):
                context.disk.through(partial(log.add, answer))
                if number % COMMIT_EVERY == 0:
                    log.commit()
        else:
            _check_template(context, asking.client)
            _ask(context, asking, log, on_progress)
        log.finish()


def try_answer(context: RoundContext, asking: Asking, sample_id: str) -> None:
    """Go on with one sample's conversation alone; its answers are kept."""
    with _open_log(context) as log:
        name = SampleId.read(sample_id)
        for talk in talks(context):
            if (talk.prompt.id, talk.answer) == (name.prompt, name.answer):
                done = log.done(talk.samples)
                for _ in _conversation(
                    context, asking, talk, done, lambda answer: context.disk.through(partial(log.add, answer))
                ):
                    pass


def _open_log(context: RoundContext) -> AnswerLog:
    journal = journal_path(context)
    return context.disk.through(lambda: AnswerLog(context.store, context.prefix("answers"), journal))


def _given(context: RoundContext, log: AnswerLog) -> Iterator[Answer]:
    """The answers of the conversations that are not kept whole yet."""
    config = context.config
    for prompt in context.prompts:
        turns = sum(message["role"] == "assistant" for message in prompt.messages)
        if str(SampleId(prompt.id, turns - 1)) not in log:
            yield from given_answers(prompt, context.chat, config.prompts.template_args)


def _check_template(context: RoundContext, client: Client) -> None:
    arguments = context.config.prompts.template_args
    for prompt in context.prompts[:TEMPLATE_PROBES]:
        ours = context.chat.render(prompt.messages, arguments, add_generation_prompt=True)
        template_gate(ours, client.tokenize_chat(prompt.messages, arguments), context.chat.decode)


def _ask(context: RoundContext, asking: Asking, log: AnswerLog, on_progress: OnProgress | None) -> None:
    wanted = talks(context)
    still_open = [talk for talk in wanted if talk.samples[-1] not in log]
    done = log.done([sample_id for talk in still_open for sample_id in talk.samples])
    left_out = f" ({len(asking.quarantined)} quarantined)" if asking.quarantined else ""
    meter = Meter(f"conversations{left_out}:", len(wanted), len(wanted) - len(still_open), on_progress)

    def record(answer: Answer) -> bool:
        new = log.add(answer)
        done.setdefault(answer.sample_id, answer)  # a conversation that is taken up again goes on after it
        return new

    def converse(talk: Talk) -> int:
        tokens = sum(len(answer.answer_ids) for answer in _conversation(context, asking, talk, done, record))
        for sample_id in talk.samples:
            done.pop(sample_id, None)  # nothing goes on after them, and answers are large
        return tokens

    config = context.config.generate
    while still_open:
        again: list[Talk] = []
        todo = _while_there_is_room(context, still_open)
        with closing(run_pool(todo, converse, config.concurrency, 2 * config.concurrency)) as results:
            for number, (talk, outcome) in enumerate(results, 1):
                if isinstance(outcome, DiskFull):
                    again.append(talk)
                    context.disk.wait(outcome)
                elif isinstance(outcome, Exception):
                    raise outcome
                else:
                    meter.add(1, outcome)
                if number % COMMIT_EVERY == 0:
                    log.commit()
        still_open = again


def _while_there_is_room(context: RoundContext, wanted: list[Talk]) -> Iterator[Talk]:
    """The conversations; the next one waits while the disk is too full, and those in flight end meanwhile."""
    config = context.config.generate
    size = ANSWER_TOKEN_BYTES * config.max_tokens * (COMMIT_EVERY + 2 * config.concurrency)
    for talk in wanted:
        context.disk.before("the next answers", store=size, scratch=size)
        yield talk


def _conversation(
    context: RoundContext, asking: Asking, talk: Talk, done: dict[str, Answer], record: Keep
) -> Iterator[Answer]:
    """Answer the open turns of one conversation, in order; each is recorded before the next is asked."""
    prompt = talk.prompt
    messages: list[Message] | str = prompt.messages
    answers: list[Answer] = []
    for turn in range(talk.turns):
        if isinstance(messages, str):
            _skip_rest(talk, turn, answers[-1], messages, done, record)
            return
        known = done.get(talk.sample(turn))
        if known is None:
            known = _answer(context, asking, talk, turn, messages)
            record(known)
            yield known
        answers.append(known)
        if known.status != "ok":
            messages = TOO_LONG if known.finish_reason == TOO_LONG else "earlier turn unanswered"
        elif turn + 1 < talk.turns:
            messages = context.history.after(prompt.messages, answers, prompt.turns[: turn + 1])


def _skip_rest(talk: Talk, turn: int, cause: Answer, reason: str, done: dict[str, Answer], record: Keep) -> None:
    """A conversation has ended; its turns from ``turn`` on are recorded as left out."""
    for later in range(turn, talk.turns):
        if (sample_id := talk.sample(later)) not in done:
            record(Answer(sample_id, [], [], [], reason, cause.engine, cause.sampling, "dropped", later))


def _answer(context: RoundContext, asking: Asking, talk: Talk, turn: int, messages: list[Message]) -> Answer:
    config = context.config.generate
    # A seed for each answer: two at one temperature would else be the same.
    sampling = Sampling.of(config.sampling(talk.answer), config.max_tokens, config.seed + talk.answer)
    engine = f"{context.config.serve_with} {context.versions[context.config.serve_with]}"
    prompt_ids = context.chat.render(messages, context.config.prompts.template_args, add_generation_prompt=True)
    sample_id = talk.sample(turn)

    def made(answer_ids: list[int], finish: str, status: Status) -> Answer:
        return Answer(sample_id, messages, prompt_ids, answer_ids, finish, engine, vars(sampling), status, turn)

    if len(prompt_ids) > context.config.prompts.max_prompt_tokens:
        return made([], TOO_LONG, "dropped")
    if sample_id in asking.quarantined:
        return made([], QUARANTINED, "dropped")
    try:
        with asking.flights.of(sample_id):
            reply = asking.client.generate(prompt_ids, sampling)
    except RequestRefused:
        return made([], "", "refused")
    if reply.prompt_ids != prompt_ids:
        raise EngineError(
            f"the engine worked on other tokens than it was sent for sample {sample_id}",
            expected=f"{len(prompt_ids)} prompt tokens, got {len(reply.prompt_ids)}",
        )
    empty = all(token in context.chat.eos_ids for token in reply.token_ids)
    return made(reply.token_ids, reply.finish_reason, "empty" if empty else "ok")
