"""Conversations that are stored as trees of replies, as OpenAssistant's are: a row for each message, or nested."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from infra.data.tally import Unusable
from infra.data.values import own_id

Node = Mapping[str, Any]
"""A message: its `role`, `text`, `replies`, and perhaps `rank`, `deleted`, `review_result`."""
ROW = ("message_id", "parent_id", "role", "text")
"""Fields of a message in a row of its own; one without a parent begins a conversation."""
OF_A_REPLY = (*ROW, "rank", "deleted", "review_result")


def with_trees_as_conversations(records: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The records, and in the place of trees one conversation each, along the replies of the best rank.

    Rows may stand in any order, so they are kept to the end of the source: memory grows with them, and only with them.
    """
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for place, record in records:
        if isinstance(record, Mapping) and all(field in record for field in ROW):
            name, parent = own_id(record["message_id"]), own_id(record["parent_id"])
            row = {field: record.get(field) for field in (OF_A_REPLY if parent else record)}
            row |= {"parent_id": parent, "replies": []}
            if name is None or rows.setdefault(name, (place, row))[1] != row:
                yield place, Unusable("has the message_id of another message", str(name))
        elif isinstance(record, Mapping) and _is_node(record.get("prompt")):
            yield place, _conversation(record["prompt"], record)
        else:
            yield place, record
    yield from _joined(rows)


def _joined(rows: Mapping[str, tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """The conversations of rows, and the rows that belong to none."""
    for _, row in rows.values():
        if row["parent_id"] in rows:
            rows[row["parent_id"]][1]["replies"].append(row)
    roots = [(place, row) for place, row in rows.values() if row["parent_id"] is None]
    reached = {id(node) for _, root in roots for node in _all(root)}
    for place, row in rows.values():
        if row["parent_id"] is None:
            yield place, _conversation(row, row)
        elif id(row) not in reached:
            yield place, Unusable("replies to a message that is not there", row["parent_id"])


def _conversation(root: Node, record: Mapping[str, Any]) -> Any:
    """The record that a tree makes, with the plain fields of the one that holds its root."""
    if _is_out(root):
        return Unusable("was taken out by those who made the data")
    path = [root]
    while replies := [node for node in _replies(path[-1]) if not _is_out(node)]:
        path.append(min(replies, key=_rank))
    if len(path) > 1 and len(path) % 2:
        path.pop()  # a question that nobody answered
    messages = [{"role": node["role"], "content": node["text"]} for node in path]
    return {
        **record,
        "id": root.get("message_id"),
        "prompt": None,
        "text": None,
        "messages": messages,
        "other_replies": len(path) < sum(1 for _ in _all(root)),
    }


def _all(root: Node) -> Iterator[Node]:
    waiting = [root]
    while waiting:
        yield (node := waiting.pop())
        waiting += _replies(node)


def _replies(node: Node) -> list[Node]:
    return [reply for reply in node.get("replies") or () if _is_message(reply)]


def _is_node(value: Any) -> bool:
    return _is_message(value) and isinstance(value.get("replies"), list)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and {"role", "text"} <= value.keys()


def _is_out(node: Node) -> bool:
    return node.get("deleted") is True or node.get("review_result") is False


def _rank(node: Node) -> float:
    """0 is the best; one without a rank comes last."""
    rank = node.get("rank")
    return rank if isinstance(rank, int | float) else float("inf")
