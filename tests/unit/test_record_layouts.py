"""What is read of one record, and why one is left out."""

import json
import math
import uuid
from typing import Any

import pytest

from infra.data.layouts import Answers, to_prompt
from infra.data.prompt import content_id
from infra.data.tally import Unusable

U, A = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
MORE, END = {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long"}
S = {"role": "system", "content": "Be brief."}
TOOL = {"role": "tool", "content": "2.1"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [U, A]},
        {"conversations": [U, A]},
        {"conversation": [HUMAN, GPT]},
        {"dialogue": [U, A]},
        {"conversations": [HUMAN, {"from": "chatgpt", "value": "Hello"}]},
        {"conversations": [{"from": "prompter", "value": "Hi"}, {"from": "bing", "value": "Hello"}]},
        {"conversations": [{"from": "Human", "value": "Hi", "weight": None}, {"from": "MODEL", "value": "Hello"}]},
        {"messages": [{"role": "user", "text": "Hi", "from": None}, {"role": "bot", "value": "Hello", "weight": 1}]},
        {"messages": json.dumps([U, A])},
        {"messages": json.dumps([U, A]).encode()},
        {"messages": {"role": ["user", "assistant"], "content": ["Hi", "Hello"]}},
        {"messages": [{"role": "system", "content": "  "}, U, A]},
        {"messages": [{"role": "system", "content": None}, U, A]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, A]},
        {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "Hi", "image_url": None}]}, A]},
        {"messages": [], "conversations": None, "prompt": "Hi", "response": "Hello"},
        {"prompt": [U], "chosen": [A], "rejected": [END]},
        {"prompt": "Hi", "chosen": [U, A], "rejected": [U, END]},
        {"prompt": [U], "completion": [A]},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": b"Hi", "completion": b"Hello"},
        {"chosen": [U, A], "rejected": [U, END]},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"question": "Hi", "answer": "Hello"},
        {"query": "Hi", "response": "Hello"},
        {"problem": "Hi", "solution": "Hello"},
        {"input": [U], "output": "Hello"},
        {"inputs": "Hi", "output": "Hello"},
        [U, A],
        {"messages": [U, A], "tools": "[]", "functions": [], "history": None, "images": []},
        {"messages": [U, {**A, "tool_calls": "[]", "function_call": {"name": None, "arguments": None}}]},
        {"messages": [U, A], "images": [None], "audio": {"path": None, "bytes": None}},
        {"turns": 1, "messages": 2, "conversation": [U, A]},
        {"conversation": "chat-17", "prompt": "Hi", "response": "Hello"},
        {"turns": 1, "prompt": "Hi", "completion": "Hello", "label": True},
        {"problem": "Hi", "solution": "Hello", "answer": "42"},
        {"inputs": "Hi", "targets": "Hello"},
        {"data": ["Hi", "Hello"], "id": "0"},
        {"conversation": [{"input": "Hi", "output": "Hello"}]},
        {"conversation": [{"human": "Hi", "assistant": "Hello"}]},
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: What?"},
        {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": "Hello", "rejected": "What?"},
        {"prompt": "Hi", "chosen": "\n\nHuman: Hi\n\nAssistant: Hello"},
        {"text": "### Human: Hi### Assistant: Hello"},
        {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}, {"role": "model", "parts": [{"text": "Hello"}]}]},
        {"messages": [{"role": "user", "content": [{"text": "Hi"}]}, A]},
        {"messages": [{"role": "User", "content": "Hi"}, {"role": "Chatbot", "content": "Hello"}]},
        {"conversation": [{"speaker": "user", "utterance": "Hi"}, {"speaker": "assistant", "utterance": "Hello"}]},
        {"chat": [U, A]},
        {"data": [U, A]},
        {"dialog": ["Hi", "Hello"], "emotion": [0, 1]},
        {"conversation": {"messages": [U, A]}},
        {"row_idx": 0, "row": {"prompt": "Hi", "response": "Hello"}, "truncated_cells": []},
        {"input": {"messages": [U], "tools": []}, "preferred_output": [A], "non_preferred_output": [END]},
        {"conversations": [HUMAN], "chosen": {"from": "gpt", "value": "Hello"}},
        {"messages": [U], "completion": "Hello"},
        {"prompt": json.dumps([U]), "response": "Hello"},
        {"input": [U], "output": "Hello", "reasoning": "off"},
        {"Question": "Hi", "Answer": "Hello"},
        {"problem": "Hi", "generated_solution": "Hello", "expected_answer": "4"},
    ],
)
def test_one_question_and_answer_in_many_layouts(record: Any) -> None:
    prompt, without = to_prompt(record, "target")
    assert (prompt.messages, prompt.turns, without) == ([U], [], [])
    prompt, without = to_prompt(record, "given")
    assert (prompt.messages, prompt.turns, without) == ([U, A], [], [])


@pytest.mark.parametrize(
    ("record", "messages", "turns", "without"),
    [
        ({"messages": [{**S, "role": "developer"}, U, A, MORE]}, [S, U], ["Bye"], []),
        ({"messages": [U], "system": "Be brief."}, [S, U], [], []),
        ({"question": "Hi", "system_prompt": "Be brief."}, [S, U], [], []),
        ({"messages": [S, U], "system": "Be long."}, [S, U], [], []),
        ({"messages": [U, A, A, MORE]}, [U], ["Bye"], []),
        ({"messages": [U, MORE, A]}, [U], ["Bye"], []),
        ({"messages": [U, {**A, "content": ""}, MORE]}, [U], ["Bye"], []),
        ({"messages": [U, {**A, "content": None}, MORE]}, [U], ["Bye"], []),
        ({"messages": [U, {**A, "content": [{"type": "image"}]}]}, [U], [], []),
        ({"messages": [U, {**A, "reasoning_content": "Greet."}]}, [U], [], []),
        ({"messages": [U, {**A, "weight": 0}]}, [U], [], []),
        ({"messages": [U, CALL, TOOL, END, MORE]}, [U], [], ["what follows a call of a tool"]),
        ({"messages": [U, A, MORE, TOOL, END]}, [U], ["Bye"], ["what follows a call of a tool"]),
        ({"messages": [U, A, S, MORE]}, [U], [], ["what follows a system message in the middle"]),
        ({"messages": [U, A], "tools": [{"name": "tide"}]}, [U], [], ["its tools"]),
        ({"instruction": "Hi", "history": [["a", "b"]]}, [U], [], ["its history"]),
        ({"messages": [{**U, "name": "Ann"}, A]}, [U], [], ["names of speakers"]),
        ({"turns": [U, A, MORE]}, [U], ["Bye"], []),
        ({"data": ["Hi", "Hello", "Bye", "Ciao"]}, [U], ["Bye"], []),
        ({"dialog": [{"input": "Hi", "output": "x"}, {"input": "Bye", "output": "y"}]}, [U], ["Bye"], []),
        ({"instruction": "Hi", "context": "Sea.", "response": "x"}, [{**U, "content": "Hi\n\nSea."}], [], []),
        ({"question": "Hi", "context": {"title": ["Sea"]}, "answer": "x"}, [U], [], ["its context"]),
        ({"prompt": "null"}, [{**U, "content": "null"}], [], []),
        ({"prompt": "[1] says: Human: x"}, [{**U, "content": "[1] says: Human: x"}], [], []),
        ({"prompt": "Human: who?"}, [{**U, "content": "Human: who?"}], [], []),
        ({"chosen": "\n\nHuman: Hi\n\nAssistant: a:\n\nb\n\nHuman: Bye\n\nAssistant: "}, [U], ["Bye"], []),
        ({"prompt": ["Hi", "Bye"], "reference": []}, [U], ["Bye"], []),
        ({"turns": [{"content": "Hi"}, {"content": "Bye"}]}, [U], ["Bye"], []),
        ({"input": "Hi", "context": "Sea.", "answers": ["x"]}, [{**U, "content": "Hi\n\nSea."}], [], []),
        ({"prompt": "Hi", "context": "Sea.", "response": "x"}, [U], [], ["its context"]),
        ({"question": "Hi", "choices": ["a", "b"], "answer": 1}, [U], [], ["its choices"]),
        ({"body": {"model": "m", "messages": [S, U]}, "custom_id": "7"}, [S, U], [], []),
        ({"body": {"messages": [U], "tools": [{"name": "tide"}]}}, [U], [], ["its tools"]),
    ],
)
def test_only_what_the_target_is_asked_counts(record: Any, messages: Any, turns: Any, without: Any) -> None:
    prompt, left = to_prompt(record, "target")
    assert (prompt.messages, prompt.turns, left) == (messages, turns, without)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"messages": [U, A, A]}, "has two answers in a row"),
        ({"messages": [U, A, MORE]}, "does not end with an answer"),
        ({"messages": [U]}, "has no answer"),
        ({"prompt": "Hi"}, "has no answer"),
        ({"turns": ["Hi", "Bye"]}, "has no answer"),
        ({"messages": [U, {**A, "content": " "}]}, "has an answer that is blank"),
        ({"messages": [U, {**A, "content": None}]}, "has an answer that is blank"),
        ({"messages": [U, {**A, "content": [{"type": "thinking"}]}]}, "has an answer with parts that are not text"),
        ({"messages": [U, A, S, MORE, END]}, "has a system message in the middle"),
        ({"messages": [U, CALL, TOOL, END]}, "has calls of tools"),
        ({"messages": [U, {**A, "function_call": {"name": "f"}}]}, "has calls of tools"),
        ({"messages": [U, {**A, "reasoning_content": "Greet."}]}, "has reasoning in a field of its own"),
        ({"messages": [U, {**A, "weight": 0}]}, "has answers that are not to be trained on"),
        ({"prompt": "Hi", "answer": 4}, "has an answer that is not text"),
        ({"prompt": "Hi", "response": "Hello", "reasoning": "Greet."}, "has reasoning in a field of its own"),
        ({"prompt": "Hi", "completion": "Hello", "label": False}, "has answers that are not to be trained on"),
        ({"prompt": "Hi", "answer": ["a", "b"]}, "has `answer` with messages that are no objects"),
    ],
)
def test_given_answers_must_be_whole(record: Any, kind: str) -> None:
    assert to_prompt(record, "target")[0].messages == [U]
    with pytest.raises(Unusable) as caught:
        to_prompt(record, "given")
    assert caught.value.kind == kind


@pytest.mark.parametrize("answers", ["target", "given"])
@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ("Hi", "is not a JSON object"),
        (None, "is not a JSON object"),
        ({"text": "Hi"}, "has none of the fields"),
        ({}, "has none of the fields"),
        ({"data": [{"prompt": "Hi"}]}, "has none of the fields"),
        ({"text": "Human: Hi"}, "has none of the fields"),
        ({"prompt": ["Hi", "Bye"], "answer": ["Hello", "Ciao"]}, "has many answers beside a list of texts"),
        ({"prompt": None}, "has an empty `prompt`"),
        ({"turns": []}, "has an empty `turns`"),
        ({"messages": "[]"}, "has no question"),
        ({"messages": "Hi there"}, "has `messages` that is text but not JSON"),
        ({"messages": "[{'role': 'user'}]"}, "has `messages` that is text but not JSON"),
        ({"chosen": "Hello"}, "has `chosen` that is text but not JSON"),
        ({"messages": 3}, "has `messages` that is no list of messages"),
        ({"messages": {"role": ["user"], "content": []}}, "has `messages` that is no list of messages"),
        ({"messages": ["Hi"]}, "has `messages` with messages that are no objects"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "has a message of a role that is not known"),
        ({"messages": [{"content": "x"}]}, "has a message of a role that is not known"),
        ({"messages": [S]}, "has no question"),
        ({"messages": [U, A], "system": ["Be brief."]}, "has a system message with parts that are not text"),
        ({"messages": [A, U, END]}, "begins with an answer"),
        ({"messages": [S, S, U, A]}, "has two system messages"),
        ({"messages": [{**U, "content": ""}, A]}, "has a question that is blank"),
        ({"messages": [{**U, "content": []}, A]}, "has a question that is blank"),
        ({"messages": [{**U, "content": {"parts": ["Hi"]}}, A]}, "has a question that is not text"),
        ({"messages": [{**U, "content": [{"type": "image_url"}]}, A]}, "has a question with parts that are not text"),
        ({"messages": [{**U, "content": [{"type": "text", "text": {"value": "x"}}]}, A]}, "has a question with parts"),
        ({"messages": [U, A], "images": ["a.png"]}, "has images, video or sound"),
        ({"messages": [{**U, "content": "half \ud83d"}, A]}, "has text that is not Unicode"),
        ({"messages": [{**U, "content": b"\xff"}, A]}, "has bytes where text should be"),
    ],
)
def test_what_can_be_used_in_no_way(record: Any, kind: str, answers: Answers) -> None:
    with pytest.raises(Unusable) as caught:
        to_prompt(record, answers)
    assert caught.value.kind.startswith(kind)


@pytest.mark.parametrize(
    ("own", "name"),
    [
        (7, "7"),
        (7.0, "7"),
        ("7", "7"),
        (1.5, "1.5"),
        (b"abc", "abc"),
        (b"\x01\x02", "0102"),
        (uuid.UUID(int=0), "0" * 8),
    ],
)
def test_ids_of_any_kind_are_text(own: Any, name: str) -> None:
    assert to_prompt({"id": own, "prompt": "Hi"}, "target")[0].id.startswith(name)


@pytest.mark.parametrize("own", [None, "", " ", math.nan, math.inf, True, [], {"a": 1}, "\ud800"])
def test_content_names_what_has_no_usable_id(own: Any) -> None:
    assert to_prompt({"id": own, "prompt": "Hi"}, "target")[0].id == content_id([U])
