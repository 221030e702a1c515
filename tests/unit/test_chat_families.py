"""The chat templates of current families, as packages ship them: what the target wrote stays what it wrote.

Each row says by hand what a target of that family writes for a thought and a content. A scripted target writes just
that; the prompt of its next turn must hold its own tokens (with the thinking or without it) and else only what the
template writes, or the conversation must end there. ``python tests/unit/test_chat_families.py`` prints the table.
"""

import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from standin.tiny_chat import make_chat

from infra.data.history import ENDINGS, UNPARTED, History
from infra.data.masks import Refusal, given_answers
from infra.data.prompt import Message, Prompt
from infra.data.template import Chat
from infra.errors import ConfigError
from infra.store.answers import Answer

CASES = Path(__file__).parents[1] / "cases" / "templates"
FOLDERS = {"trl": "chat_templates", "axolotl": "utils/chat_templates/templates"}
SPECIAL = re.compile(
    r"<[|｜][^<>|｜]+[|｜]>|<\|\w+>|<\w+\|>|</?(?:think|s|start_of_turn|end_of_turn)>|\[/?(?:INST|THINK)\]"
)
WORDS: tuple[str, ...] = (
    "[|assistant|]",
    "[|user|]",
    "[|endofturn|]",
    "[INST]",
    "[/INST]",
    "to=self",
    "to=user",
    "/nothink",
    "<response>",
    "</response>",
)
WORDS += ("assistant", "user", "model", "final", "analysis", "thought")

THOUGHT = "Zwei und zwei."
CONTENTS = {
    "plain": "Vier (4).",
    "newline after": "Vier (4).\n",
    "blank after": "Vier (4). ",
    "newlines before": "\n\nVier (4).",
    "blank before": " Vier (4).",
    "paragraphs": "Vier.\n\n* 2\n* 2\n\nFertig",
    "a call": '<tool_call>\n{"name": "f"}\n</tool_call>\nVier (4).',
    "names the mark": "Man schreibt </think> und <think> so.",
    "names the mark twice": "</think> vier </think>.",
}


@dataclass(frozen=True)
class Family:
    """One template with one choice of arguments.

    Attributes:
        file: ``package/name`` of the template, or the name alone for those of ``tests/cases``.
        end: the token with which the target ends its turn.
        thought: what it writes around a thought, up to the content; empty if it does not think.
        plain: what it writes before a content when it does not think.
        args: the template's arguments.
        after: what it writes behind a content, before ``end``.
        ends: an answer ends its conversation: the template adds words to it.
    """

    file: str
    end: str
    thought: str = ""
    plain: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    after: str = ""
    ends: bool = False

    def __str__(self) -> str:
        return f"{self.file}{''.join(f' {name}={value}' for name, value in self.args.items())}"


QWEN, R1, GLM, NEMOTRON = (
    "<think>\n{}\n</think>\n\n",
    "<think>\n{}\n</think>\n\n",
    "\n<think>{}</think>\n",
    "<think>\n{}\n</think>\n",
)
ULTRA, LFM, GEMMA = "<think>\n{}</think>", "<think>{}</think>", "<|channel>thought\n{}\n<channel|>"
HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>"
MUSE = " to=self<|message|>{}<|eom|><|start|>assistant to=user<|message|>"
KIMI = "<think>{}</think>"
TWO_NEWLINES = "<think>\n\n{}\n</think>\n\n"
IM, TURN, COHERE, SENTENCE = "<|im_end|>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>"
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
FAMILIES: tuple[Family, ...] = (
    Family("trl/qwen2_5", IM),
    Family("trl/qwen2_5_vl", IM),
    Family("trl/qwen3", IM, QWEN),
    Family("trl/qwen3", IM, args=OFF),
    Family("trl/qwen3_instruct_2507", IM),
    Family("trl/qwen3_vl", IM),
    Family("trl/qwen3_5_think", IM, QWEN),
    Family("trl/qwen3_5_think", IM, args=OFF),
    Family("trl/qwen3_5_nothink", IM, QWEN, args=ON),
    Family("trl/qwen3_5_nothink", IM),
    Family("trl/qwen3_6", IM, QWEN),
    Family("trl/qwen3_6", IM, args=OFF),
    Family("trl/qwen3_8", IM, QWEN),
    Family("trl/qwen3_8", IM, args=OFF),
    Family("trl/qwen3_8", IM, QWEN, args={"preserve_thinking": False}),
    Family("trl/deepseekv3", SENTENCE, R1),
    Family("trl/deepseek_r1_distill", SENTENCE, R1),
    Family("trl/glm4moe", "<|user|>", GLM),
    Family("trl/glm4moe", "<|user|>", plain="\n", args=OFF),
    Family("trl/gptoss", "<|return|>", HARMONY, "<|channel|>final<|message|>"),
    Family("trl/nemotron_3_nano", IM, NEMOTRON),
    Family("trl/nemotron_3_nano", IM, args=OFF),
    Family("trl/nemotron_3_nano", IM, NEMOTRON, args={"truncate_history_thinking": False}),
    Family("trl/nemotron_3_super", IM, NEMOTRON),
    Family("trl/nemotron_3_super", IM, args=OFF),
    Family("trl/nemotron_3_ultra", IM, ULTRA),
    Family("trl/nemotron_3_ultra", IM, args=OFF),
    Family("trl/nemotron_3_5_lightning", IM, ULTRA),
    Family("trl/nemotron_3_5_lightning", IM, args=OFF),
    Family("trl/muse_glimmer", "<|eot|>", MUSE, " to=user<|message|>"),
    Family("trl/lfm2", IM),
    Family("trl/lfm2_v2", IM),
    Family("trl/lfm2_2_5", IM, LFM),
    Family("trl/lfm2_2_5_v2", IM, LFM),
    Family("trl/lfm2_2_5_vl", IM, LFM),
    Family("trl/llama3", "<|eot_id|>"),
    Family("trl/llama3_1", "<|eot_id|>"),
    Family("trl/llama3_2", "<|eot_id|>"),
    Family("trl/gemma", "<end_of_turn>"),
    Family("trl/gemma3", "<end_of_turn>"),
    Family("trl/gemma4", TURN, GEMMA, args=ON),
    Family("trl/gemma4", TURN),
    Family("trl/gemma4_v5", TURN, GEMMA, args=ON),
    Family("trl/gemma4_v5", TURN),
    Family("trl/phi3", "<|end|>"),
    Family("trl/phi3_5", "<|end|>"),
    Family("trl/cohere", COHERE),
    Family("trl/cohere2", COHERE, after="<|END_RESPONSE|>"),
    Family("axolotl/command_a", COHERE, after="<|END_RESPONSE|>"),
    Family("axolotl/command_a_rag", COHERE, plain="<|START_RESPONSE|>", after="<|END_RESPONSE|>"),
    Family("axolotl/aya", COHERE),
    Family("axolotl/chatml", IM),
    Family("axolotl/deepseek_v2", IM),
    Family("axolotl/deepseek_v3", SENTENCE),
    Family("axolotl/exaone", "[|endofturn|]"),
    Family("axolotl/exaone4", "[|endofturn|]", QWEN, args=ON),
    Family("axolotl/exaone4", "[|endofturn|]"),
    Family("axolotl/falcon_h1", IM),
    Family("axolotl/gemma3n", "<end_of_turn>"),
    Family("axolotl/gemma4", TURN, GEMMA, args=ON),
    Family("axolotl/gemma4", TURN),
    Family("axolotl/jamba", "<|eom|>", plain=" "),
    Family("axolotl/llama3_2_vision", "<|eot_id|>"),
    Family("axolotl/llama4", "<|eot|>"),
    Family("axolotl/mistral_v1", IM, plain=" "),
    Family("axolotl/mistral_v2v3", IM, plain=" "),
    Family("axolotl/mistral_v3_tekken", IM),
    Family("axolotl/mistral_v7_tekken", IM),
    Family("axolotl/nemotron_h", IM),
    Family("axolotl/phi_4", IM),
    Family("axolotl/qwen3", IM, TWO_NEWLINES),
    Family("axolotl/qwen3", IM, args=OFF),
    Family("axolotl/qwen3_5", IM, TWO_NEWLINES),
    Family("axolotl/qwen3_5", IM, args=OFF),
    Family("axolotl/metharme", IM),
    Family("channels", "<|return|>", HARMONY, "<|channel|>final<|message|>"),
    Family("empty-thought-put-in", IM),
    Family("no-system", "<end_of_turn>"),
    Family("thinking-mark-is-special", "<|im_end|>", KIMI),
    Family("thinking-mark-is-special", "<|im_end|>", args={"thinking": False}),
    Family("words-before-end", IM, plain="<response>\n", after="\n</response>\n\n"),
)
USER = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role != 'assistant' %}{{ m.content }}"
FOOT = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINKING_FOOT = FOOT.replace("assistant\n{%", "assistant\n<think>\n{%")
OWN = {
    # Thinking is a field, and left out of all answers up to the last one, in the structure of Kimi-K2.5's.
    "own: history apart": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content if loop.index0 > ns.last }}</think>{% endif %}"
    "{{ m.content }}" + FOOT.replace("assistant\n{%", "assistant\n<think>{%"),
    "own: kept in a field": USER
    + "{% else %}{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}{% endif %}" + THINKING_FOOT,
    "own: another mark": USER + "{% else %}{{ m.content.split('</seed:think>')[-1] }}{% endif %}" + FOOT,
    "own: empty thought everywhere": USER
    + "{% else %}<think>\n\n</think>\n{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% endif %}" + FOOT,
    "own: opened and forgotten": USER + "{% else %}{{ m.content | trim }}{% endif %}" + THINKING_FOOT,
    "own: shortened": USER + "{% else %}{{ m.content if loop.last else m.content[:12] }}{% endif %}" + FOOT,
    "own: remark": USER + "{% else %}(earlier) {{ m.content }}{% endif %}" + FOOT,
}
FAMILIES += (
    Family("own: history apart", IM, KIMI),
    Family("own: kept in a field", IM, QWEN),
    Family("own: another mark", IM, "<seed:think>{}</seed:think>"),
    Family("own: empty thought everywhere", IM, NEMOTRON),
    Family("own: opened and forgotten", IM, QWEN),
    Family("own: shortened", IM),
    Family("own: remark", IM, ends=True),
)
FIRST, SECOND, THIRD = "Frage eins", "Frage zwei", "Frage drei"


def source(file: str) -> str:
    """A template's text; the packages are found, never imported."""
    if file in OWN:
        return OWN[file]
    package, _, name = file.rpartition("/")
    if not package:
        return (CASES / f"{name}.jinja").read_text()
    found = importlib.util.find_spec(package)
    assert found is not None, f"{package} is not installed"
    assert found.origin is not None
    return (Path(found.origin).parent / FOLDERS[package] / f"{name}.jinja").read_text()


def family_chat(folder: Path, family: Family, *, marks: bool, words: bool = False) -> Chat:
    """The family's template on a tokenizer of bytes; ``marks``: marks of thinking are special tokens.

    With ``words`` it parts texts as GPT-2's and SmolLM2's do, and has tokens of a blank and a word's beginning.
    """
    template = source(family.file)
    special = {*SPECIAL.findall(template), family.end, "<|im_start|>", "<|im_end|>", "<s>"}
    special -= set() if marks else {"<think>", "</think>", "[THINK]", "[/THINK]"}
    merges = [("Ċ", "Ċ"), ("Ġ", "V"), ("V", "i"), ("ĠV", "i"), (")", ".")] if words else [("Ċ", "Ċ")]
    return make_chat(folder, template, merges, sorted(special), family.end, "<s>", words)


def written(family: Family, prompt: str, thought: str, content: str) -> str:
    """What the target writes after ``prompt``, which may hold its beginning."""
    before = family.thought.format(thought) if family.thought else family.plain
    held = next((n for n in range(len(before), 0, -1) if prompt.endswith(before[:n])), 0)
    return before[held:] + content + family.after + family.end


def reply(
    chat: Chat, messages: list[Message], family: Family, text: str, turn: int = 0, finish: str = "stop"
) -> Answer:
    """The answer of a target that writes ``text``."""
    prompt_ids = chat.render(messages, family.args)
    return Answer(f"p#{turn}", messages, prompt_ids, chat.encode(text), finish, "scripted", {}, "ok", turn)


def foreign(chat: Chat, ids: list[int], question: str, following: str, thought: str, content: str) -> str:
    """What stands between two questions beside the answer's own text and what templates write; empty if it is right."""
    shown = chat.decode(ids)
    between = shown[shown.index(question) + len(question) : shown.index(following)]
    if between.count(content.strip()) != 1 or between.count(thought) > 1:
        return between
    around = between.replace(content.strip(), "")
    if around.count("<think>") != around.count("</think>"):
        return around
    if around.count("</response>") > 1:
        return around
    rest = SPECIAL.sub("", around.replace(thought, ""))
    for word in WORDS:
        rest = rest.replace(word, "")
    return rest.strip()


def holds(ids: list[int], part: list[int]) -> bool:
    """Whether token ids stand in a row in others."""
    return any(ids[start : start + len(part)] == part for start in range(len(ids) - len(part) + 1))


def run_of(chat: Chat, ids: list[int], text: str) -> tuple[int, int]:
    """The first and shortest run of tokens whose text holds another text: from one place up to the other."""
    end = next(count for count in range(len(ids) + 1) if text in chat.decode(ids[:count]))
    start = next(place for place in range(end, -1, -1) if text in chat.decode(ids[place:end]))
    return start, end


def of_target(chat: Chat, family: Family, content: str) -> str:
    """``exact`` for two turns after the first, or why the conversation ended, or what is wrong."""
    asked: list[Message] = [{"role": "user", "content": FIRST}]
    questions, answers = (SECOND, THIRD), []
    history = History(chat, family.args)
    messages = asked
    thoughts, contents = (THOUGHT, "Drei und drei."), (content, "Sechs.")
    for turn in range(len(questions)):
        prompt = chat.text(messages, family.args)
        thought = thoughts[turn]
        answers.append(reply(chat, messages, family, written(family, prompt, thought, contents[turn]), turn))
        made = history.after(asked, answers, questions[: turn + 1])
        if isinstance(made, str):
            assert made in ENDINGS
            return made if turn == 0 else f"later: {made}"
        messages = made
        ids = chat.render(messages, family.args)
        marks = ((FIRST, SECOND), (SECOND, THIRD))
        for place in range(turn + 1):
            rest = foreign(chat, ids, *marks[place], thoughts[place], contents[place])
            if rest:
                return f"WRONG: {rest!r} in the history"
            own = answers[place].answer_ids
            start, end = run_of(chat, own, contents[place].strip())
            if not holds(ids, own[start:end]):
                return "WRONG: other tokens"
            if family.thought and thoughts[place] in chat.decode(ids) and not holds(ids, own[:end]):
                return "WRONG: other tokens of the thought"
    return "exact"


def of_data(chat: Chat, family: Family, content: str) -> str:
    """``exact`` for both turns of a conversation with answers, or why one is left out, or what is wrong."""
    said = [FIRST, content, SECOND, content]
    messages: list[Message] = [
        {"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)
    ]
    for turn, answer in enumerate(given_answers(Prompt("p", messages), chat, family.args)):
        if answer.status != "ok":
            assert answer.finish_reason in get_args(Refusal)
            return answer.finish_reason
        text = chat.decode(answer.answer_ids)
        end = family.after + family.end
        core = content.strip()
        if not text.endswith(end) or text.removesuffix(end).strip() != core:
            return f"WRONG: {text!r} is supervised"
        prompt = chat.decode(answer.prompt_ids)
        last = chat.text(answer.messages, family.args, False)
        if not (last + end).startswith(prompt + text) and not last.startswith(prompt + text.removesuffix(end)):
            return "WRONG: not a beginning of the rendering"
        if (FIRST, SECOND)[turn] not in prompt:
            return "WRONG: another turn"
    return "exact"


def of_thinking_data(chat: Chat, family: Family, *, apart: bool) -> str:
    """As :func:`of_data`, for an answer with its thought: as a field of the message, or in the text."""
    thought, content = THOUGHT, CONTENTS["plain"]
    said: Message = {"role": "assistant", "content": family.thought.format(thought) + content}
    if apart:
        said |= {"content": content, "reasoning_content": thought, "thinking": thought}
    asked: Message = {"role": "user", "content": FIRST}
    [answer] = given_answers(Prompt("p", [asked, said]), chat, family.args)
    if answer.status != "ok":
        return answer.finish_reason
    as_served = chat.text([asked], family.args)
    if chat.decode(answer.prompt_ids) != as_served:
        return "WRONG: another prompt"
    text = chat.decode(answer.answer_ids)
    return "exact" if text == written(family, as_served, thought, content) else f"WRONG: {text!r} is supervised"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.thought], ids=str)
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in the text"])
def test_given_thinking_is_supervised_whole_or_left_out(tmp_path: Path, family: Family, apart: bool) -> None:
    found = of_thinking_data(family_chat(tmp_path, family, marks=False), family, apart=apart)
    assert found == "exact" or found in get_args(Refusal)


def outcome(kind: str, chat: Chat, family: Family, content: str) -> str:
    try:
        return {"target": of_target, "given": of_data}[kind](chat, family, content)
    except ConfigError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize(
    ("marks", "words"),
    [(True, False), (False, False), (True, True)],
    ids=["special marks", "marks as text", "words as GPT-2 parts them"],
)
def test_exact_or_left_out_never_wrong(tmp_path: Path, family: Family, marks: bool, words: bool) -> None:
    chat = family_chat(tmp_path, family, marks=marks, words=words)
    found = {
        (kind, name): outcome(kind, chat, family, content)
        for kind in ("target", "given")
        for name, content in CONTENTS.items()
    }
    assert not [(key, value) for key, value in found.items() if value.startswith(("WRONG", "refused"))]
    assert found["target", "plain"] == (UNPARTED if family.ends else "exact")
    # "(earlier) " ends with a blank, which GPT-2 takes to the answer's first word.
    assert found["given", "plain"] == ("boundary" if family.ends and words else "exact")


def rows() -> Iterator[tuple[Family, bool, str, str, str]]:
    """(family, whether marks are special, ``target`` or ``given``, content's name, outcome) of everything."""
    for family in FAMILIES:
        for marks in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                chat = family_chat(Path(folder), family, marks=marks)
                for kind in ("target", "given"):
                    for name, content in CONTENTS.items():
                        yield family, marks, kind, name, outcome(kind, chat, family, content)


if __name__ == "__main__":
    for row in rows():
        print(*map(str, row), sep=" | ")
