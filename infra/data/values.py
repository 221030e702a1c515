"""Values in a record: text in whichever form, and whether a field says anything."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

from infra.data.tally import Unusable

TEXT_PARTS = ("text", "input_text", "output_text")
EMPTY_JSON = ("[]", "{}", "null")


def read_text(value: Any, what: str) -> str:
    """Text that is not blank; several parts become one.

    Args:
        value: text, bytes, or a list of parts.
        what: names it, "a question" say.

    Raises:
        Unusable: it is blank, or not text.
    """
    value = decoded(value)
    if isinstance(value, list):
        kinds = [
            (part.get("type") or next(iter(part), None)) if isinstance(part, Mapping) else type(part).__name__
            for part in value
        ]
        if any(kind not in TEXT_PARTS for kind in kinds):
            raise Unusable(f"has {what} with parts that are not text", ", ".join(sorted(set(map(str, kinds))))[:60])
        texts = [part.get("text") for part in value]
        if not all(isinstance(text, str | None) for text in texts):
            raise Unusable(f"has {what} with parts that are not text", "text in text")
        value = "".join(text or "" for text in texts)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise Unusable(f"has {what} that is blank")
    if not isinstance(value, str):
        raise Unusable(f"has {what} that is not text", type(value).__name__)
    _check_unicode(value)
    return value


def _check_unicode(text: str) -> None:
    """JSON can spell half a surrogate pair, which is no character: neither tokenizers nor stores take it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unusable(
            "has text that is not Unicode", f"{text[error.start]!r} at character {error.start}, half an emoji"
        ) from error


def decoded(value: Any) -> Any:
    """Text that a Parquet file holds as bytes, as some writers do."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise Unusable("has bytes where text should be") from error


def carried(value: Any) -> bool:
    """Whether a field that may be JSON as text says anything."""
    return filled(value) and not (isinstance(value, str) and value.strip() in EMPTY_JSON)


def filled(value: Any) -> bool:
    """Whether a field says anything; a table has an object of nothing but nulls where a record had none."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):
        return any(filled(part) for part in value.values())
    if isinstance(value, list):
        return any(filled(part) for part in value)
    return value is not None and value not in (b"", False)


def own_id(value: Any) -> str | None:
    """A record's own id as text; None where it has none that could name it.

    A whole number counts as the same id however it is stored: tables turn whole numbers into floats where one is
    missing.
    """
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
        value = text if text.isprintable() and "\ufffd" not in text else value.hex()
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = int(value) if value.is_integer() else repr(value)
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal | UUID):
        return None
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return text if text.strip() else None
