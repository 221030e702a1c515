"""Conversations that are stored as trees of replies, as OpenAssistant's are: a row for each message, or nested."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from infra.data.tally import Unusable

ROW = ("message_id", "parent_id", "role", "text")
"""Fields of a message in a row of its own; one without a parent begins a conversation."""
NODE = ("role", "text", "rank", "deleted", "review_result")
"""Fields of a message that matter here."""


def with_trees_as_conversations(records: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The records, and in the place of trees one conversation each, along the replies of the best rank.

    Rows may stand in any order. So they are kept to the end of the source, with nothing but :data:`ROW` and
    :data:`NODE` of each reply.
    """
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for place, record in records:
        if isinstance(record, Mapping) and all(name in record for name in ROW):
            row = {**_kept(record), "parent_id": record["parent_id"], "replies": []}
            name = str(record["message_id"])
            if name not in rows:
                rows[name] = place, row
            elif rows[name][1] != row:
                yield place, Unusable("is another message with the same message_id", name)
        elif isinstance(record, Mapping) and _is_node(record.get("prompt")):
            yield place, {**record, **_conversation(record["prompt"])}
        else:
            yield place, record
    yield from _joined(rows)


def _joined(rows: Mapping[str, tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """The conversations of rows, and the rows that belong to none."""
    roots = []
    for place, row in rows.values():
        if not row["parent_id"]:
            roots.append((place, row))
        elif parent := rows.get(str(row["parent_id"])):
            parent[1]["replies"].append(row)
    reached: set[int] = set()
    for place, root in roots:
        reached.update(id(node) for node in _all(root))
        yield place, _conversation(root)
    for place, row in rows.values():
        if id(row) not in reached:
            yield place, Unusable("replies to a message that is not there", str(row["parent_id"]))


def _conversation(root: Mapping[str, Any]) -> dict[str, Any]:
    """The record that a tree makes."""
    path = [root]
    while replies := [node for node in _replies(path[-1]) if not _is_refused(node)]:
        path.append(min(replies, key=_rank))
    more = len(path) < sum(1 for _ in _all(root))
    messages = [{"role": node["role"], "content": node["text"]} for node in path]
    return {"prompt": None, "messages": messages, "other_replies": more, "id": root.get("message_id"), **root.get("meta", {})}


def _kept(record: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: record.get(name) for name in ("message_id", *NODE)}
    return kept if record["parent_id"] else {**kept, "meta": {"lang": record.get("lang")}}


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("replies"), list) and {"role", "text"} <= value.keys()


def _replies(node: Mapping[str, Any]) -> list[Any]:
    return [reply for reply in node.get("replies") or () if isinstance(reply, Mapping) and {"role", "text"} <= reply.keys()]


def _all(root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    waiting = [root]
    while waiting:
        yield (node := waiting.pop())
        waiting += _replies(node)


def _is_refused(node: Mapping[str, Any]) -> bool:
    """Whether those who made the data took a message out."""
    return node.get("deleted") is True or node.get("review_result") is False


def _rank(node: Mapping[str, Any]) -> float:
    """0 is the best; one without a rank comes last."""
    rank = node.get("rank")
    return rank if isinstance(rank, int | float) else float("inf")
