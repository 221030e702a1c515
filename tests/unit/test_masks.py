from pathlib import Path
from typing import get_args

import pytest
from standin.tiny_chat import CHATML, make_chat

from infra.data.masks import Refusal, Turn, given_answers, locate
from infra.data.prompt import Prompt
from infra.data.template import Chat
from infra.errors import ConfigError

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} </s>{% endif %}{% endfor %}"
)
# Thinking is taken out of all answers but the last, which always gets a thinking part.
STRIPPING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% set said = parts[-1].lstrip('\n') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts|length > 1 else '' %}"
    "<|im_start|>assistant\n"
    "{% if loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinking is defined and not thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
THINKING_PROMPT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# As STRIPPING, for every answer, and with a generation prompt that opens the thinking part.
ALWAYS_STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip() }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
UPPER = CHATML.replace("{{ m.content }}", "{{ m.content|upper if m.role == 'assistant' else m.content }}")
SIGNED = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ ' --bot' if m.role == 'assistant' }}")
FAREWELL = CHATML.replace(
    "{{ m.content }}<|im_end|>\n",
    "{{ m.content }}{% if m.role == 'user' %}<|im_end|>{% elif loop.last %} That is all.<|im_end|>{% endif %}\n",
)
NEXT_OPENS = NO_END.replace(
    "{{ m.role }}: {{ m.content }}", "{{ m.role }}: {{ m.content }}{{ '</s>' if m.role == 'user' }}"
)
DOUBLED = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content if m.role == 'assistant' }}")
DROPPED = CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}")
NO_GENERATION_PROMPT = CHATML.split("{% if add_generation_prompt")[0]

THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."


def asked(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def parts(chat: Chat, messages: list[dict[str, str]], **template_args: object) -> tuple[str, str]:
    """Prompt and answer as text; proves that they are the beginning of the whole rendering, token for token."""
    turn = locate(messages, chat, template_args)
    assert isinstance(turn, Turn), turn
    whole = chat.render(messages, template_args, add_generation_prompt=False)
    ids = turn.prompt_ids + turn.answer_ids
    assert whole[: len(ids)] == ids
    return chat.decode(turn.prompt_ids), chat.decode(turn.answer_ids)


PARAGRAPH = CHATML.replace("assistant\n", "assistant\n\n").replace(
    "{{ m.role }}\n{{ m.content }}", "{{ m.role }}\n\n{{ m.content | trim }}"
)
ANSWERS_FIRST = (
    "{% for m in messages if m.role == 'assistant' %}Said: {{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "answer", "prompt_end", "written"),
    [
        pytest.param(
            CHATML, "Four.", "<|im_start|>assistant\n", "Four.<|im_end|>", id="chatml: no newline after the end"
        ),
        pytest.param(CHATML, " Four. \n", "<|im_start|>assistant\n", " Four. \n<|im_end|>", id="chatml: blanks kept"),
        pytest.param(CHATML, THOUGHT, "<|im_start|>assistant\n", THOUGHT + "<|im_end|>", id="chatml: thinking kept"),
        pytest.param(
            CHATML, "assistant", "<|im_start|>assistant\n", "assistant<|im_end|>", id="answer looks like the role"
        ),
        pytest.param(CHATML, "Q Z Q", "<|im_start|>assistant\n", "Q Z Q<|im_end|>", id="answer looks like the probe"),
        pytest.param(CHATML, "四 🙂", "<|im_start|>assistant\n", "四 🙂<|im_end|>", id="several bytes a letter"),
        pytest.param(LLAMA2, "Four.", "[/INST]", " Four. </s>", id="llama-2"),
        pytest.param(LLAMA2, "\n Four.\n", "[/INST]", " Four. </s>", id="llama-2: blanks stripped"),
        pytest.param(STRIPPING, THOUGHT, "assistant\n", THOUGHT + "<|im_end|>", id="thinking of the last answer kept"),
        pytest.param(STRIPPING, "Four.", "assistant\n<think>\n\n</think>\n\n", "Four.<|im_end|>", id="thinking put in"),
        pytest.param(THINKING_PROMPT, THOUGHT, "<think>\n", THOUGHT[8:] + "<|im_end|>", id="prompt opens the thinking"),
        pytest.param(THINKING_PROMPT, "Four.", "assistant\n", "Four.<|im_end|>", id="thinking opened but not given"),
        pytest.param(ALWAYS_STRIPPING, "Four.", "assistant\n", "Four.<|im_end|>", id="full does not start with prompt"),
        pytest.param(DEFAULT_SYSTEM, "Four.", "assistant\n", "Four.<|im_end|>", id="default system prompt"),
        pytest.param(NO_END, "Four.", "assistant: ", "Four.", id="template without an end token"),
        pytest.param(SIGNED, "Four.", "assistant\n", "Four. --bot<|im_end|>", id="words before the end are said, too"),
        pytest.param(FAREWELL, "Four.", "assistant\n", "Four.", id="words that end only a conversation are not"),
        pytest.param(NEXT_OPENS, "Four.", "assistant: ", "Four.", id="words that open the next turn are not"),
        pytest.param(NO_GENERATION_PROMPT, "Four.", "assistant\n", "Four.<|im_end|>", id="no generation prompt"),
    ],
)
def test_exactly_what_the_assistant_wrote(
    tmp_path: Path, template: str, answer: str, prompt_end: str, written: str
) -> None:
    prompt, found = parts(make_chat(tmp_path, template), asked("What is 2 + 2?", answer))
    assert found == written
    assert prompt.endswith(prompt_end)
    assert "What is 2 + 2?" in prompt


@pytest.mark.parametrize(
    ("template", "answer", "reason"),
    [
        pytest.param(UPPER, "Four.", "rewritten", id="answer in capitals"),
        pytest.param(DOUBLED, "Four.", "rewritten", id="answer twice"),
        pytest.param(DROPPED, "Four.", "rewritten", id="answer left out"),
        pytest.param(ALWAYS_STRIPPING, THOUGHT, "rewritten", id="thinking taken out"),
        pytest.param(STRIPPING, "<think>Two.</think>Four.", "rewritten", id="thinking spaced anew"),
        pytest.param(CHATML, "Four.<|im_end|>", "special", id="end token in the answer"),
        pytest.param(CHATML, " \n", "empty", id="blank answer"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path: Path, template: str, answer: str, reason: str) -> None:
    assert locate(asked("What is 2 + 2?", answer), make_chat(tmp_path, template)) == reason
    assert reason in get_args(Refusal)


def test_a_token_across_the_border_is_refused(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, merges=[("Ċ", "F"), (".", "Ċ")])
    assert locate(asked("What?", "Four."), chat) == "boundary"
    assert parts(chat, asked("What?", "six.\nFour."))[1] == "six.\nFour.<|im_end|>"


def test_a_token_across_the_answers_end_is_refused(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, NO_END, merges=[(".", "Ċ")])
    assert locate(asked("What?", "Four."), chat) == "boundary"
    assert parts(chat, asked("What?", "Four"))[1] == "Four"


def test_a_text_that_is_parted_otherwise_alone_than_in_the_whole(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, PARAGRAPH, merges=[("Ċ", "Ċ"), ("Ġ", "F"), ("ĠF", "o")], words=True)
    prompt, whole = (chat.encode(text) for text in ("assistant\n\n", "assistant\n\nFour."))
    assert whole[: len(prompt)] != prompt  # GPT-2 parts blanks before a word otherwise
    assert parts(chat, asked("What?", "Four."))[1] == "Four.<|im_end|>"
    blank = make_chat(tmp_path / "two", CHATML.replace("\n", " "), merges=[("Ġ", "F")], words=True)
    assert locate(asked("What?", "Four."), blank) == "boundary"  # the template's blank is in the answer's first token


def test_what_opens_a_turn_ends_none(tmp_path: Path) -> None:
    assert parts(make_chat(tmp_path, ANSWERS_FIRST, eos="</s>"), asked("What?", "Four."))[1] == "Four."
    assert parts(make_chat(tmp_path / "two", CHATML, eos="</s>"), asked("What?", "Four."))[1] == "Four.<|im_end|>"


def test_every_turn_of_a_conversation(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, STRIPPING)
    prompt = Prompt("sum", asked("2 + 2?", THOUGHT, "And 3 + 3?", "<think>\nThrees.\n</think>\n\nSix."))
    first, second = given_answers(prompt, chat)
    assert [first.sample_id, second.sample_id] == ["sum#0", "sum#1"]
    assert [first.turn, second.turn] == [0, 1]
    assert first.messages == prompt.messages[:2]
    assert second.messages == prompt.messages
    assert chat.decode(first.answer_ids) == THOUGHT + "<|im_end|>"
    # The second turn's context shows the first answer as the target will see it: without its thinking.
    assert chat.decode(second.prompt_ids) == (
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
        "<|im_start|>user\nAnd 3 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.decode(second.answer_ids) == "<think>\nThrees.\n</think>\n\nSix.<|im_end|>"


def test_template_arguments_decide_the_generation_prompt(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, STRIPPING)
    prompt, answer = parts(chat, asked("2 + 2?", "Four."), thinking=False)
    assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    assert prompt == chat.text(asked("2 + 2?"), {"thinking": False})
    assert answer == "Four.<|im_end|>"


def test_refused_turns_carry_their_reason_and_the_others_stay(tmp_path: Path) -> None:
    chat = make_chat(tmp_path)
    answers = given_answers(Prompt("p", asked("a", "</s>", "b", "Yes.")), chat)
    assert [(answer.status, answer.finish_reason) for answer in answers] == [("dropped", "special"), ("ok", "given")]
    assert answers[0].answer_ids == []


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages[0]['x']['y'] }}", "{{ '%d' % 'a' }}", "{{ 'a'.index('b') }}"]
)
def test_a_template_that_fails_refuses_the_conversation(tmp_path: Path, template: str) -> None:
    with pytest.raises(ConfigError, match=r"chat template of target tiny refuses .* with arguments \{\}: \S"):
        make_chat(tmp_path, template).text(asked("What?"))
