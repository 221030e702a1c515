"""vLLM's counters of speculative decoding, in its Prometheus page."""

import re

from infra.engines.client.counters import NUMBER, SpecCounters

_COUNTER = re.compile(rf"^vllm:spec_decode_num_(\w+?)_total\{{([^}}]*)\}}\s+{NUMBER}\s*$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


def parse_spec_counters(metrics: str) -> SpecCounters | None:
    """The counters in a page; None when there are none."""
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
