"""What was left out of a source of prompts, counted by kind, with examples."""

from collections.abc import Mapping
from dataclasses import dataclass, field

EXAMPLES = 3
EXAMPLE_CHARACTERS = 300
KINDS = 40
"""Kinds told apart; what comes after is counted together, so that memory is bounded whatever the file holds."""
OTHER = "is of another kind still"


class Unusable(Exception):
    """A record that cannot be used.

    Args:
        kind: why, as a phrase that goes on from "a record that ..." and under which it is counted.
        detail: what this one record has there, shown with the example.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind} ({detail})" if detail else kind)


@dataclass
class Kind:
    """How many records of a kind there are, and where the first of them lie."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


class Tally:
    """Counts over one source of prompts.

    Attributes:
        source: the source as the round names it.
        read: records read, those that cannot be used included.
        left_out: records that cannot be used, by kind.
        without: records that are used without something they carry, by what that is.
        notes: what else a reader should know.
    """

    def __init__(self, source: str = "") -> None:
        self.source = source
        self.read = 0
        self.left_out: dict[str, Kind] = {}
        self.without: dict[str, Kind] = {}
        self.notes: list[str] = []

    def leave_out(self, why: Unusable, place: str) -> None:
        """Count a record that cannot be used."""
        _count(self.left_out, why.kind, f"{place}: {why.detail}" if why.detail else place)

    def use_without(self, what: str, place: str) -> None:
        """Count a record that is used without something it carries."""
        _count(self.without, what, place)

    @property
    def left_out_count(self) -> int:
        """Records that cannot be used."""
        return sum(kind.count for kind in self.left_out.values())

    def left_out_text(self) -> str:
        """All kinds that were left out; empty if none."""
        return _text(self.left_out)

    def sentences(self) -> list[str]:
        """What a reader of the plan or the report should know."""
        found = list(self.notes)
        if self.left_out:
            count = f"{self.left_out_count:,} of {self.read:,} records"
            found.append(f"{count} of {self.source} are left out: {_text(self.left_out)}")
        if self.without:
            found.append(f"records of {self.source} are used without something they carry: {_text(self.without)}")
        return found


def _count(kinds: dict[str, Kind], name: str, example: str) -> None:
    if name not in kinds and len(kinds) >= KINDS:
        name = OTHER
    kind = kinds.setdefault(name, Kind())
    kind.count += 1
    if len(kind.examples) < EXAMPLES:
        # It may quote the data: half a character, which JSON can spell, cannot be printed.
        kind.examples.append(" ".join(example.encode(errors="backslashreplace").decode().split())[:EXAMPLE_CHARACTERS])


def _text(kinds: Mapping[str, Kind]) -> str:
    ordered = sorted(kinds.items(), key=lambda item: (-item[1].count, item[0]))
    return "; ".join(f"{kind.count:,} x {name} ({'; '.join(kind.examples)})" for name, kind in ordered)
