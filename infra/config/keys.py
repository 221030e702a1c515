"""Step keys: a short hash of everything that decides a step's result."""

import hashlib
import json
from typing import Any

from pydantic import BaseModel


def decisive(model: BaseModel) -> dict[str, Any]:
    """Dump of a config without its knobs (fields that change speed, not results) and later fields at their default."""
    result: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("knob"):
            continue
        value = getattr(model, name)
        if isinstance(extra, dict) and extra.get("later") and value == field.get_default(call_default_factory=True):
            continue
        result[name] = decisive(value) if isinstance(value, BaseModel) else json.loads(_canonical(value))
    return result


def key12(**inputs: Any) -> str:
    """First 12 hex digits of the SHA-256 of the canonical JSON of ``inputs``; configs enter without their knobs."""
    plain = {name: decisive(value) if isinstance(value, BaseModel) else value for name, value in inputs.items()}
    return hashlib.sha256(_canonical(plain).encode()).hexdigest()[:12]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"cannot hash a {type(value).__name__} into a step key")
