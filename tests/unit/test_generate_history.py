"""The generate and prepare steps with a target that thinks, in process: an engine that says what the test wants."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from standin.brain import Brain
from standin.machine import Machine, new_machine
from standin.tiny import NAME, THINGS
from standin.tiny_chat import make_target

from infra.data.build import HELD_OUT_ONCE
from infra.data.history import CUT, OTHER_HISTORY, UNPARTED, History
from infra.data.prompt import Message
from infra.engines.client.client import Client
from infra.engines.client.dialect import Generation
from infra.engines.client.flights import Flights
from infra.errors import GateError
from infra.round.context import RoundContext
from infra.steps.generate import Asking, generate
from infra.steps.prepare import HISTORIES, prepare, sample_counts
from infra.store.answers import read_answers
from infra.store.sample_ids import SampleId

KIMI = (Path(__file__).parents[1] / "cases" / "templates" / "thinking-mark-is-special.jinja").read_text()
SPECIAL = ("<think>", "</think>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
Says = Callable[[str], tuple[str, str]]
CONVERSATIONS = len(THINGS)


class Engine:
    """What a step needs of a :class:`Client`; ``says`` gives text and finish reason for a prompt's text."""

    def __init__(self, context: RoundContext, says: Says) -> None:
        self.chat, self.says = context.chat, says

    def generate(self, prompt_ids: Sequence[int], *_: Any, **__: Any) -> Generation:
        text, finish = self.says(self.chat.decode(prompt_ids))
        return Generation(self.chat.encode(text), finish, list(prompt_ids))

    def tokenize_chat(self, messages: Sequence[Message], template_args: Mapping[str, Any]) -> list[int]:
        return self.chat.render(messages, template_args)


def ask(context: RoundContext, says: Says) -> None:
    generate(context, Asking(cast(Client, Engine(context, says)), Flights()))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    machine = new_machine(tmp_path_factory.mktemp("thinking"))
    make_target(machine.folder / "state" / "models" / NAME, KIMI, special=SPECIAL)
    return machine


@pytest.fixture
def context(thinking: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoundContext:
    made = thinking.copy(tmp_path).enter(monkeypatch).round()
    made.versions = {"vllm": "1", "speculators": "1"}
    return made


def thinks(prompt: str) -> tuple[str, str]:
    return ("Hm.</think>More.<|im_end|>" if "More." in prompt else "So so.</think>Much.<|im_end|>"), "stop"


def test_a_later_turn_sees_the_answer_without_its_thinking(context: RoundContext) -> None:
    ask(context, thinks)
    prepare(context)
    assert len(context.samples) == 2 * CONVERSATIONS
    for sample in context.samples:
        prompt = context.chat.decode(sample.input_ids[: sample.loss_mask.index(1)])
        if sample.sample_id.endswith("#1"):
            assert "assistant<|im_middle|><think></think>Much.<|im_end|><|im_user|>" in prompt
        assert "So so." not in prompt
    context.store.delete(f"{context.prefix('samples')}/{HISTORIES}")
    assert prepare(context), "samples of an earlier version with right histories are good"


@pytest.mark.parametrize(
    ("said", "reason"),
    [(("So so.</think>Mu", "length"), CUT), (("So so<|im_end|>", "stop"), UNPARTED)],
    ids=["cut", "thinking without end"],
)
def test_a_conversation_that_ends_is_counted_and_does_not_stop_the_round(
    context: RoundContext, said: tuple[str, str], reason: str
) -> None:
    ask(context, lambda prompt: said if f"of {THINGS[0]}" in prompt or f"of {THINGS[1]}" in prompt else thinks(prompt))
    prepare(context)
    assert sample_counts(context)[reason] == 2
    assert len(context.samples) == 2 * CONVERSATIONS - 2


class Killed(Exception):
    """What ends the engine in the middle."""


class Sampled(Engine):
    """An engine whose answers show how they were sampled; it dies before answer ``dies_at``."""

    def __init__(self, context: RoundContext, dies_at: int | None = None) -> None:
        super().__init__(context, thinks)
        self.asked: list[tuple[str, float, int]] = []
        self.dies_at = dies_at

    def generate(self, prompt_ids: Sequence[int], *sampling: Any, **_: Any) -> Generation:
        [said] = sampling
        if len(self.asked) == self.dies_at:
            raise Killed
        prompt = self.chat.decode(prompt_ids)
        self.asked.append((prompt, said.temperature, said.seed))
        text = f"So.</think>Much at {said.temperature} by {said.seed}.<|im_end|>"
        return Generation(self.chat.encode(text), "stop", list(prompt_ids))


SEVERAL = {"generate__further_temperatures": [1.0, 0.7], "generate__concurrency": 1}


def test_several_answers_to_a_prompt_each_with_its_own_history(
    thinking: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle and taken up again, the round makes the same samples as one that was not."""

    def ready(folder: str) -> RoundContext:
        made = thinking.copy(tmp_path / folder).enter(monkeypatch).round(**SEVERAL)
        made.versions = {"vllm": "1", "speculators": "1"}
        return made

    calm = ready("calm")
    engine = Sampled(calm)
    generate(calm, Asking(cast(Client, engine), Flights()))
    prepare(calm)
    assert len(engine.asked) == 3 * 2 * CONVERSATIONS
    seed = calm.config.generate.seed
    assert {(temperature, said) for _, temperature, said in engine.asked} == {(0, seed), (1, seed + 1), (0.7, seed + 2)}
    for prompt, temperature, said in engine.asked:
        assert "Much at" not in prompt or f"Much at {temperature} by {said}." in prompt
    split = {
        kind: {SampleId.read(sample.sample_id) for sample in calm.samples if sample.split == kind}
        for kind in ("train", "heldout")
    }
    assert not {name.prompt for name in split["train"]} & {name.prompt for name in split["heldout"]}
    assert {name.answer for name in split["train"]} == {0, 1, 2}
    assert {name.answer for name in split["heldout"]} == {0}
    assert sample_counts(calm)[HELD_OUT_ONCE] == 2 * len(split["heldout"])

    killed = ready("killed")
    dying = Sampled(killed, dies_at=7)
    with pytest.raises(Killed):
        generate(killed, Asking(cast(Client, dying), Flights()))
    again = Sampled(killed)
    generate(killed, Asking(cast(Client, again), Flights()))
    prepare(killed)
    assert len(again.asked) == len(engine.asked) - 7
    assert killed.samples == calm.samples


def glued(_: History, messages: list[Message], answers: object, questions: Sequence[str]) -> list[Message]:
    """What an earlier version made of an answer."""
    said = {"role": "assistant", "content": "So so.Much."}
    return [*messages, said, {"role": "user", "content": questions[-1]}]


def test_stored_answers_of_an_earlier_version_are_judged(
    context: RoundContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(History, "after", glued)
        ask(context, thinks)
    assert all(answer.status == "ok" for answer in read_answers(context.store, context.prefix("answers")).values())
    with pytest.raises(GateError, match=f"{CONVERSATIONS} {OTHER_HISTORY}"):
        prepare(context)


def test_stored_samples_of_an_earlier_version_are_judged_once(
    context: RoundContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(History, "after", glued)
        earlier.setattr(History, "_same", lambda *_: True)
        ask(context, thinks)
        prepare(context)
    [marker] = [info.path for info in context.store.list(context.prefix("samples")) if info.path.endswith(HISTORIES)]
    context.store.delete(marker)
    again = RoundContext(context.config, context.settings)
    again.versions = context.versions
    for _ in range(2):
        with pytest.raises(GateError, match=f"{CONVERSATIONS} of {2 * CONVERSATIONS} samples"):
            prepare(again)


def test_the_stand_ins_answers_make_histories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = new_machine(tmp_path).enter(monkeypatch).round()
    context.versions = {"vllm": "1", "speculators": "1"}
    brain = Brain(context.target.path, context.config.extract.taps)

    class StandIn(Engine):
        def generate(self, prompt_ids: Sequence[int], *_: Any, **__: Any) -> Generation:
            tokens, finish = brain.answer(prompt_ids, context.config.generate.max_tokens)
            return Generation(tokens, finish, list(prompt_ids))

    generate(context, Asking(cast(Client, StandIn(context, thinks)), Flights()))
    prepare(context)
    assert len(context.samples) == 2 * CONVERSATIONS
