"""Every field of a round and every setting of the machine as a page, made from the types themselves.

``docs/round-fields.md`` is what :func:`page` gives: ``eagle3 fields > docs/round-fields.md`` writes it anew.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from infra.config.round import RoundConfig
from infra.config.settings import Settings

HEADER = """\
# Every field of a round

This page is made from the types: `eagle3 fields > docs/round-fields.md`. [A round of your own](round.md) tells how to
use it. A field marked **knob** decides no result: changing it redoes no step. Of the serving engine's ladder alone the
evaluation is done again, for it decides the speed that is measured.
"""
SETTINGS = """
## Settings of the machine

Paths, ports and credentials are no part of a round. They are environment variables.

| variable | default | meaning |
|---|---|---|
"""
TABLE = "\n| field | takes | default | meaning |\n|---|---|---|---|\n"
NUMBERS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
NO_RESULT = ("description", "gates", "retention", "budget", "gpu")
"""Sections and fields that are in no step's key."""
BOUNDS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))


@dataclass(frozen=True)
class FieldFacts:
    """One field, in words.

    Attributes:
        name: dotted, as ``--set`` takes it.
        takes: kind of value and its bounds.
        default: as YAML takes it; empty when it must be given.
        meaning: the field's description.
        knob: whether it decides no result.
    """

    name: str
    takes: str
    default: str
    meaning: str
    knob: bool


def fields() -> list[FieldFacts]:
    """Every field of a round, in the order of its sections."""
    schema = RoundConfig.model_json_schema()
    return list(_fields(schema, schema["$defs"], ""))


def page() -> str:
    """The page, Markdown."""
    sections: dict[str, list[FieldFacts]] = {}
    for facts in fields():
        sections.setdefault(facts.name.rpartition(".")[0], []).append(facts)
    text = HEADER
    for section, found in sections.items():
        title = f"`{section}`" if section else "The round"
        text += f"\n## {title}\n{TABLE}" + "".join(map(_row, found))
    rows = (
        f"| `EAGLE3_{name.upper()}` | {_setting_default(name)} | {_cell(field.description or '')} |\n"
        for name, field in Settings.model_fields.items()
    )
    return text + SETTINGS + "".join(rows)


def as_facts() -> list[dict[str, Any]]:
    """Every field of a round for a machine."""
    return [asdict(facts) for facts in fields()]


def _fields(schema: dict[str, Any], defs: dict[str, Any], prefix: str) -> Iterator[FieldFacts]:
    """The plain fields of a section, then those of the sections within it."""
    sections = []
    for name, about in schema["properties"].items():
        inner, where = _section(about, defs)
        if inner is None:
            yield _facts(f"{prefix}{name}", about, name in schema.get("required", ()))
        elif not (prefix and inner is defs["PromptsConfig"]):
            sections.append((inner, f"{prefix}{name}{where}."))
            if where == "[]":
                default = json.dumps(about["default"])
                yield FieldFacts(f"{prefix}{name}", "list", default, about["description"], _is_knob(name, about))
        else:
            said = f"{about['description']} The same fields as `prompts`."
            default = ", ".join(f"{key}: {about['default'][key]}" for key in ("source", "count"))
            yield FieldFacts(f"{prefix}{name}", "section", f"{{{default}}}", said, knob=False)
    for inner, path in sections:
        yield from _fields(inner, defs, path)


def _section(about: dict[str, Any], defs: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The schema of the section that a field holds, and what stands between the field's name and the section's."""
    for place, where in ((about, ""), (about.get("additionalProperties"), ".<engine>"), (about.get("items"), "[]")):
        kinds = [] if not isinstance(place, dict) else place.get("anyOf", [place])
        for kind in kinds:
            inner = defs.get(kind.get("$ref", "").rpartition("/")[2], {})
            if "properties" in inner:
                return inner, where
    return None, ""


def _facts(name: str, about: dict[str, Any], required: bool) -> FieldFacts:
    default = "" if required else json.dumps(about.get("default", {}))
    return FieldFacts(name, _takes(about), default, about["description"], _is_knob(name, about))


def _is_knob(name: str, about: dict[str, Any]) -> bool:
    return bool(about.get("knob")) or name.partition(".")[0] in NO_RESULT


def _takes(about: dict[str, Any]) -> str:
    """Kind and bounds of a value in words."""
    if "anyOf" in about:
        return " or ".join("empty" if kind.get("type") == "null" else _takes(kind) for kind in about["anyOf"])
    if "enum" in about:
        return " or ".join(f"`{value}`" for value in about["enum"])
    if about.get("type") == "array":
        return f"list of {_takes(about['items'])}"
    if about.get("type") == "object":
        return "mapping"
    bounds = ", ".join(f"{sign} {about[key]:g}" for key, sign in BOUNDS if key in about)
    return f"{NUMBERS[about['type']]}{' ' * bool(bounds)}{bounds}"


def _row(facts: FieldFacts) -> str:
    default = f"`{facts.default}`" if facts.default else "must be given"
    knob = " **knob**" if facts.knob else ""
    return f"| `{facts.name}` | {_cell(facts.takes)} | {_cell(default)} | {_cell(facts.meaning)}{knob} |\n"


def _setting_default(name: str) -> str:
    """Folders begin in the home of whoever asks, which is no part of a page."""
    folders = {"cache_dir": "`~/.cache/eagle3`", "state_dir": "`~/.local/state/eagle3`"}
    default = Settings.model_fields[name].default
    return folders.get(name) or ("empty" if default in ("", None) else f"`{json.dumps(default)}`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")
