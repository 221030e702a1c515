"""Conversations of trees of replies, as OpenAssistant's data has them."""

import random
from typing import Any

import pytest

from infra.data.layouts import to_prompt
from infra.data.tally import Unusable
from infra.data.trees import with_trees_as_conversations


def row(name: Any, parent: Any, text: str, **more: Any) -> dict[str, Any]:
    role = "prompter" if text.endswith("?") else "assistant"
    return {"message_id": name, "parent_id": parent, "role": role, "text": text, **more}


TREE = [
    row("q", None, "Q?", lang="en"),
    row("a", "q", "Good", rank=0),
    row("b", "q", "Bad", rank=1),
    row("c", "q", "Taken out", rank=0, deleted=True),
    row("d", "q", "Refused", rank=-1, review_result=False),
    row("e", "a", "More?"),
    row("f", "e", "Yes"),
    row("g", "f", "And?"),
]


def read(rows: list[Any]) -> list[Any]:
    return [record for _, record in with_trees_as_conversations((f"p:{n}", row) for n, row in enumerate(rows, 1))]


@pytest.mark.parametrize("seed", range(5))
def test_the_best_replies_make_the_conversation_in_whatever_order_rows_stand(seed: int) -> None:
    rows = list(TREE)
    random.Random(seed).shuffle(rows)
    (record,) = read(rows)
    prompt, without = to_prompt(record, "given")
    assert (prompt.id, prompt.meta["lang"]) == ("q", "en")
    assert [message["content"] for message in prompt.messages] == ["Q?", "Good", "More?", "Yes"]
    assert [message["role"] for message in prompt.messages] == ["user", "assistant"] * 2
    assert without == ["its other replies"]
    assert to_prompt(record, "target")[0].turns == ["More?"]


def test_a_question_alone_is_asked() -> None:
    prompt, without = to_prompt(read([TREE[0]])[0], "target")
    assert (prompt.messages, without) == ([{"role": "user", "content": "Q?"}], [])


def test_what_belongs_to_no_question_is_left_out_with_its_place() -> None:
    circle = [row("x", "y", "Yes"), row("y", "x", "No")]
    other = [row("q", None, "Another?"), TREE[0]]
    found = list(with_trees_as_conversations((f"p:{n}", row) for n, row in enumerate([*TREE, *circle, *other], 1)))
    assert [place for place, record in found if isinstance(record, Unusable)] == ["p:11", "p:9", "p:10"]
    assert [str(record) for _, record in found if isinstance(record, Unusable)] == [
        "has the message_id of another message (q)",
        "replies to a message that is not there (y)",
        "replies to a message that is not there (x)",
    ]
    assert isinstance(read([{**TREE[0], "deleted": True}])[0], Unusable)


def test_numbers_name_rows_however_they_are_stored() -> None:
    (record,) = read([row(1, float("nan"), "Q?"), row(2, 1.0, "Good")])
    assert [message["content"] for message in record["messages"]] == ["Q?", "Good"]


def test_other_records_pass_as_they_are() -> None:
    records = [{"prompt": "Hi"}, Unusable("is not JSON"), [], {"prompt": {"role": "user", "text": "Hi"}}]
    assert read(records) == records
