"""Histories: what the second turn sees of the first answer, through the generate and prepare steps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from standin.tiny_chat import CHATML, make_chat

from infra.config.round import GenerateConfig, PrepareConfig
from infra.data.build import BuildReport, build_samples, with_right_histories
from infra.data.gate import shares_gate
from infra.data.history import CUT, OTHER_HISTORY, UNPARTED, History
from infra.data.prompt import Message
from infra.data.template import Chat
from infra.errors import GateError
from infra.store.answers import Answer

TEMPLATES = Path(__file__).parents[1] / "cases" / "templates"
KIMI = (TEMPLATES / "thinking-mark-is-special.jinja").read_text()
KIMI_TOKENS = ("<think>", "</think>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
CHANNELS = (TEMPLATES / "channels.jinja").read_text()
CHANNEL_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
FIRST: list[Message] = [{"role": "user", "content": "2 + 2?"}]


def kimi(folder: Path) -> Chat:
    return make_chat(folder, KIMI, special=KIMI_TOKENS)


def answer(chat: Chat, said: str, messages: list[Message] = FIRST, turn: int = 0, finish: str = "stop") -> Answer:
    return Answer(f"p#{turn}", messages, chat.render(messages), chat.encode(said), finish, "vllm 1", {}, "ok", turn)


def seen(chat: Chat, said: str, finish: str = "stop", **args: Any) -> str:
    """What the second turn's prompt shows between the questions, or why there is no second turn."""
    made = History(chat, args).after(FIRST, [answer(chat, said, finish=finish)], ["And 3 + 3?"])
    if isinstance(made, str):
        return made
    text = chat.text(made, args)
    return text[text.index("2 + 2?") + 6 : text.index("And 3 + 3?")]


HEAD, TAIL = "<|im_end|><|im_assistant|>assistant<|im_middle|>", "<|im_end|><|im_user|>user<|im_middle|>"


@pytest.mark.parametrize(
    ("said", "history"),
    [
        pytest.param("Two and two make four.</think>Four.<|im_end|>", "<think></think>Four.", id="thinking left out"),
        pytest.param("</think>Four.<|im_end|>", "<think></think>Four.", id="empty thinking"),
        pytest.param("It is four.</think>\n\nFour. \n<|im_end|>", "<think></think>\n\nFour. \n", id="blanks stay"),
    ],
)
def test_marks_of_thinking_that_are_special_tokens(tmp_path: Path, said: str, history: str) -> None:
    assert seen(kimi(tmp_path), said) == f"{HEAD}{history}{TAIL}"


@pytest.mark.parametrize(
    ("said", "finish", "reason"),
    [
        pytest.param("Two and two make<|im_end|>", "stop", UNPARTED, id="thinking without end"),
        pytest.param("Hm.</think>Not </think>.<|im_end|>", "stop", UNPARTED, id="two ends of thinking"),
        pytest.param("Hm.</think><|im_end|>", "stop", UNPARTED, id="nothing but thinking"),
        pytest.param("Hm.</think>Four", "length", CUT, id="cut"),
        pytest.param("Hm, two and", "length", CUT, id="cut in the thinking"),
    ],
)
def test_a_conversation_ends_where_its_history_could_be_wrong(
    tmp_path: Path, said: str, finish: str, reason: str
) -> None:
    assert seen(kimi(tmp_path), said, finish) == reason


def test_without_thinking_a_mark_in_the_answer_ends_the_conversation(tmp_path: Path) -> None:
    chat = kimi(tmp_path)
    assert seen(chat, "Four.<|im_end|>", thinking=False) == f"{HEAD}<think></think>Four.{TAIL}"
    assert seen(chat, "Write </think> here.<|im_end|>", thinking=False) == UNPARTED


def test_channels(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, CHANNELS, special=CHANNEL_TOKENS, eos="<|return|>")
    final, history = "<|channel|>final<|message|>Four.", "<|start|>assistant<|channel|>final<|message|>Four.<|end|>"
    around = "<|end|>{}<|start|>user<|message|>"
    thought = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant"
    assert seen(chat, f"{thought}{final}<|return|>") == around.format(history)
    assert seen(chat, f"{final}<|return|>") == around.format(history)
    assert seen(chat, f"{thought}{final} More:{thought}{final}<|return|>") == UNPARTED
    assert seen(chat, "<|channel|>analysis<|message|>Two.<|return|>") == UNPARTED


def test_marks_that_the_template_does_not_know_stay_as_they_are(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, CHATML, special=("[THINK]", "[/THINK]", "<|im_start|>", "<|im_end|>"))
    said = "[THINK]Two and two.[/THINK]Four."
    assert said in seen(chat, f"{said}<|im_end|>")


def test_a_template_that_keeps_thinking_shows_it_whole_or_the_conversation_ends(tmp_path: Path) -> None:
    keeping = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}",
    )
    chat = make_chat(tmp_path, keeping)
    thought = "<think>\nTwo and two.\n</think>\n\nFour.<|im_end|>"
    assert thought in seen(chat, thought)
    assert seen(chat, thought.replace("\n", "")) == UNPARTED


def test_the_end_of_a_turn_comes_once(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, eos="</s>")
    around = "<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n<|im_start|>user\n"
    assert seen(chat, "Four.<|im_end|></s>") == seen(chat, "Four.</s>") == seen(chat, "Four.<|im_end|>") == around


def test_a_call_is_not_taken_for_thinking(tmp_path: Path) -> None:
    template = "{# <tool_call> </tool_call> #}" + CHATML
    said = "<tool_call>f()</tool_call>Four."
    assert said in seen(make_chat(tmp_path, template), f"{said}<|im_end|>")


def test_tokens_that_the_tokenizer_would_not_make_of_the_text_end_the_conversation(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, merges=[("F", "o")])
    assert "Four." in seen(chat, "Four.<|im_end|>")
    odd = replace(answer(chat, ""), answer_ids=[*chat.encode("F"), *chat.encode("our.<|im_end|>")])
    assert History(chat).after(FIRST, [odd], ["More."]) == UNPARTED


def conversation(chat: Chat, second: Callable[[list[Message]], list[Message]] = lambda made: made) -> dict[str, Answer]:
    """Two answered turns; ``second`` changes the messages that the second one saw."""
    first = answer(chat, "Two and two.</think>Four.<|im_end|>")
    made = History(chat).after(FIRST, [first], ["And 3 + 3?"])
    assert not isinstance(made, str)
    return {"p#0": first, "p#1": answer(chat, "Threes.</think>Six.<|im_end|>", second(made), turn=1)}


def glued(made: list[Message]) -> list[Message]:
    """As earlier versions had it: the answer without its special tokens."""
    return [made[0], {"role": "assistant", "content": "Two and two.Four."}, made[2]]


def test_stored_answers_with_a_right_history_pass(tmp_path: Path) -> None:
    chat = kimi(tmp_path)
    answers = conversation(chat)
    assert with_right_histories(answers, History(chat)) == list(answers.values())


def test_stored_answers_with_a_wrong_history_are_left_out_and_the_data_gate_stops(tmp_path: Path) -> None:
    chat = kimi(tmp_path)
    answers = conversation(chat, glued) | {"q#0": replace(answer(chat, "Hm.</think>Yes.<|im_end|>"), sample_id="q#0")}
    report = build_samples(with_right_histories(answers, History(chat)), PrepareConfig(heldout=0.5))
    assert report.dropped == {OTHER_HISTORY: 1}
    assert {sample.sample_id for sample in report.samples} == {"p#0", "q#0"}
    with pytest.raises(GateError, match="1 the prompt shows earlier answers otherwise"):
        shares_gate(report, GenerateConfig())


def test_turns_that_were_never_asked_do_not_stop_the_round(tmp_path: Path) -> None:
    shares_gate(BuildReport([], answers=10, dropped={CUT: 4, UNPARTED: 4}), GenerateConfig())
    with pytest.raises(GateError, match="4 boundary"):
        shares_gate(BuildReport([], answers=10, dropped={"boundary": 4}), GenerateConfig())


def test_stored_histories_of_plain_answers_by_earlier_versions_still_count(tmp_path: Path) -> None:
    chat = make_chat(tmp_path)
    messages: list[Message] = [*FIRST, {"role": "assistant", "content": "Four."}, {"role": "user", "content": "More."}]
    answers = {"p#0": answer(chat, "Four.<|im_end|>"), "p#1": answer(chat, "Six.<|im_end|>", messages, turn=1)}
    assert with_right_histories(answers, History(chat)) == list(answers.values())
    cut = answers | {"p#0": answer(chat, "Four.", finish="length")}
    assert [found.finish_reason for found in with_right_histories(cut, History(chat))] == ["length", CUT]


def test_a_date_in_the_template_does_not_make_a_stored_history_wrong(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, "{{ day or 'Monday' }}\n" + CHATML)
    first = answer(chat, "Four.<|im_end|>")
    made = History(chat).after(FIRST, [first], ["More."])
    assert not isinstance(made, str)
    later = replace(answer(chat, "Six.<|im_end|>", made, turn=1), prompt_ids=chat.render(made, {"day": "Wednesday"}))
    assert History(chat).fault(later, [first]) is None
    assert History(chat).fault(replace(later, prompt_ids=later.prompt_ids[:-3]), [first]) == OTHER_HISTORY
