"""The generate step: the target answers the prompts, or the answers that the data has are taken."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from infra.data.build import TOO_LONG
from infra.data.gate import template_gate
from infra.data.masks import given_answers
from infra.data.prompt import Message, Prompt, next_prompt
from infra.engines.client import Client, RequestRefused
from infra.engines.pool import run_pool
from infra.errors import EngineError
from infra.steps.context import Round
from infra.steps.progress import Meter, OnProgress
from infra.store.answers import Answer, AnswerLog, Status

TEMPLATE_PROBES = 4
COMMIT_EVERY = 256
Record = Callable[[Answer], bool]


def journal_path(round_: Round) -> Path:
    """Local journal of answers that are not in the store yet."""
    return round_.scratch / f"answers-{round_.keys.answers}.jsonl"


def answers_done(round_: Round) -> bool:
    """Whether the answers of this key are complete and verify."""
    return AnswerLog.finished(round_.store, round_.prefix("answers"))


def generate(round_: Round, client: Client | None, on_progress: OnProgress | None = None) -> int:
    """Bring the answers of this round's key to completion; returns how many were there already.

    Args:
        client: the target's server; None when the data has answers of its own.

    Raises:
        EngineError: the server stopped answering; everything answered so far is kept.
        GateError: template and engine tokenise differently.
    """
    with AnswerLog(round_.store, round_.prefix("answers"), journal_path(round_)) as log:
        earlier = len(log.done())
        if client is None:
            for answer in _given(round_):
                log.add(answer)
        else:
            _check_template(round_, client)
            _ask(round_, client, log, on_progress)
        log.finish()
    return earlier


def _given(round_: Round) -> Iterator[Answer]:
    config = round_.config
    for prompt in round_.prompts:
        yield from given_answers(prompt, round_.chat, config.prompts.template_args)


def _check_template(round_: Round, client: Client) -> None:
    arguments = round_.config.prompts.template_args
    for prompt in round_.prompts[:TEMPLATE_PROBES]:
        ours = round_.chat.render(prompt.messages, arguments, add_generation_prompt=True)
        template_gate(ours, client.tokenize_chat(prompt.messages, arguments), round_.chat.decode)


def _ask(round_: Round, client: Client, log: AnswerLog, on_progress: OnProgress | None) -> None:
    done = log.done()
    turns = {prompt.id: 1 + len(prompt.turns) for prompt in round_.prompts}
    open_prompts = [prompt for prompt in round_.prompts if f"{prompt.id}#{turns[prompt.id] - 1}" not in done]
    meter = Meter("prompts answered:", len(turns), len(turns) - len(open_prompts), on_progress)

    def converse(prompt: Prompt) -> int:
        return sum(len(answer.answer_ids) for answer in _conversation(round_, client, prompt, done, log.add))

    config = round_.config.generate
    with closing(run_pool(open_prompts, converse, config.concurrency, 2 * config.concurrency)) as results:
        for number, (_, outcome) in enumerate(results, 1):
            if isinstance(outcome, Exception):
                raise outcome
            meter.add(1, outcome)
            if number % COMMIT_EVERY == 0:
                log.commit()


def _conversation(
    round_: Round, client: Client, prompt: Prompt, done: dict[str, Answer], record: Record
) -> Iterator[Answer]:
    """Answer the open turns of one conversation, in order; each is recorded before the next is asked."""
    texts: list[str] = []
    for turn in range(1 + len(prompt.turns)):
        known = done.get(f"{prompt.id}#{turn}")
        if known is None:
            known = _answer(round_, client, prompt, turn, next_prompt(prompt, texts))
            record(known)
            yield known
        if known.status != "ok":
            _skip_rest(prompt, turn, known, done, record)
            return
        texts.append(round_.chat.decode(known.answer_ids, special=False))


def _skip_rest(prompt: Prompt, turn: int, cause: Answer, done: dict[str, Answer], record: Record) -> None:
    """A conversation ends at a turn without an answer; its later turns are recorded as such."""
    reason = TOO_LONG if cause.finish_reason == TOO_LONG else "earlier turn unanswered"
    for later in range(turn + 1, 1 + len(prompt.turns)):
        sample_id = f"{prompt.id}#{later}"
        if sample_id not in done:
            record(Answer(sample_id, [], [], [], reason, cause.engine, cause.sampling, "dropped", later))


def _answer(round_: Round, client: Client, prompt: Prompt, turn: int, messages: list[Message]) -> Answer:
    config = round_.config.generate
    sampling = {
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "seed": config.seed,
    }
    engine = f"{round_.config.serve_with} {round_.versions[round_.config.serve_with]}"
    prompt_ids = round_.chat.render(messages, round_.config.prompts.template_args, add_generation_prompt=True)

    def made(answer_ids: list[int], finish: str, status: Status) -> Answer:
        return Answer(f"{prompt.id}#{turn}", messages, prompt_ids, answer_ids, finish, engine, sampling, status, turn)

    if len(prompt_ids) > round_.config.prompts.max_prompt_tokens:
        return made([], TOO_LONG, "dropped")
    try:
        reply = client.generate(
            prompt_ids,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            seed=config.seed,
        )
    except RequestRefused:
        return made([], "", "refused")
    if reply.prompt_ids != prompt_ids:
        raise EngineError(
            f"the engine worked on other tokens than it was sent for sample {prompt.id}#{turn}",
            expected=f"{len(prompt_ids)} prompt tokens, got {len(reply.prompt_ids)}",
        )
    empty = all(token in round_.chat.eos_ids for token in reply.token_ids)
    return made(reply.token_ids, reply.finish_reason, "empty" if empty else "ok")
