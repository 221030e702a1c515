"""The engine's counters of speculative decoding."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class SpecCounters:
    """The engine's counters of speculative decoding; they only grow, the difference of two is a measurement.

    Args:
        drafts: target steps that verified a draft.
        draft_tokens: tokens proposed.
        accepted: tokens accepted.
        accepted_per_position: accepted tokens by position in the draft.
    """

    drafts: int
    draft_tokens: int
    accepted: int
    accepted_per_position: tuple[int, ...]

    def __add__(self, other: "SpecCounters") -> "SpecCounters":
        positions = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return SpecCounters(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted + other.accepted,
            tuple(one + two for one, two in positions),
        )

    def __sub__(self, earlier: "SpecCounters") -> "SpecCounters":
        positions = zip(self.accepted_per_position, earlier.accepted_per_position, strict=True)
        return SpecCounters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(now - then for now, then in positions),
        )


_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
_COUNTER = re.compile(rf"^vllm:spec_decode_num_(\w+?)_total\{{([^}}]*)\}}\s+{_NUMBER}\s*$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


def parse_spec_counters(metrics: str) -> SpecCounters | None:
    """vLLM's counters of speculative decoding in a Prometheus page; None when there are none."""
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _COUNTER.findall(metrics):
        if position := _POSITION.search(labels):
            positions[int(position.group(1))] = positions.get(int(position.group(1)), 0) + int(float(value))
        else:
            totals[name] = totals.get(name, 0) + int(float(value))
    if "drafts" not in totals:
        return None
    by_position = tuple(positions[index] for index in sorted(positions))
    return SpecCounters(totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], by_position)


_TOKENS = re.compile(
    rf"^(?:vllm|sglang):(?:prompt|generation)_tokens_total(?:\{{[^}}]*\}})?\s+{_NUMBER}\s*$", re.MULTILINE
)


def parse_token_total(metrics: str) -> float | None:
    """Tokens that an engine has read and written so far, by its Prometheus page; None when it does not count them."""
    totals = [float(value) for value in _TOKENS.findall(metrics)]
    return sum(totals) if totals else None
