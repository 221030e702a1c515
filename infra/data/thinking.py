"""How templates and targets mark thinking."""

import re

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names by which templates take an answer's thinking apart from its content."""
CLOSING_MARK = re.compile(r"[<\[◁]\|?/[^\s<>\[\]'\"]+[>\]▷]|<\w+\|>|<\|(?:END|end)_\w+\|>")
"""What may end thinking: `</think>`, `[/THINK]`, `<channel|>`, `<|END_THINKING|>` and their like."""


def opening_mark(closing: str) -> str:
    """The mark that goes before a mark of :data:`CLOSING_MARK`."""
    if "/" in closing:
        return closing.replace("/", "", 1)
    if closing.startswith("<|"):
        return closing.replace("END_", "START_", 1).replace("end_", "begin_", 1)
    return f"<|{closing[1:-2]}>"
