"""What README, changelog and docs say, against the code: commands, options, variables, fields, rounds, paths, links."""

import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from deployments.catalogue import catalogue
from deployments.cli.app import app
from deployments.cli.rounds import parse_overrides
from deployments.fields import fields
from infra.config.load import build_round, load_round, round_file
from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.environments.descriptions import descriptions
from infra.errors import Gate

CHECKOUT = round_file("smoke").parents[2]
PAGES = {
    str(page.relative_to(CHECKOUT)): page.read_text()
    for page in (CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md", *sorted((CHECKOUT / "docs").glob("*.md")))
}
LONGEST_SENTENCE = 30
ELSEWHERE = {"EAGLE3_FLOWS", "EAGLE3_ROOT"}
"""Read before there are settings: in deployments/bin, and where the checkout is looked for."""
SECTIONS = tuple(RoundConfig.model_fields)
FIELDS = {facts.name for facts in fields()}
ROUNDS = {"smoke", "laptop", "smoke-sglang", "small-gpu", "round2", "tiny", "mine", "ROUND"}
"""Rounds of the checkout, and what stands for a reader's own."""


def fenced(text: str, language: str) -> list[str]:
    """The blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def code(text: str) -> list[str]:
    """Everything between single backticks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def words_of(line: str) -> list[list[str]]:
    """The commands of a line of shell, as words, without comments."""
    parts = re.split(r"&&|\|\||;|(?<!\S)&(?!\S)", re.sub(r"(?<!\S)#.*", "", line))
    return [shlex.split(part) for part in parts if part.strip()]


def commands(program: str) -> list[tuple[str, tuple[str, ...]]]:
    """(page, words behind the program) of every command that is named, in blocks and in running text."""
    found = set()
    for page, text in PAGES.items():
        lines = "".join(fenced(text, "bash")).replace("\\\n", " ").splitlines()
        lines += [said for said in code(text) if re.match(rf"{program} [a-z-]", said)]
        found |= {
            (page, tuple(words[1:])) for line in lines for words in words_of(line) if words and words[0] == program
        }
    return sorted(found)


def test_the_readme_is_one_page() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 130


@pytest.mark.parametrize("page", sorted(set(PAGES) - {"CHANGELOG.md"}))
def test_a_page_has_short_sentences(page: str) -> None:
    text = re.sub(r"^```.*?^```", "\n\n", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    text = "\n".join("\n" if line.startswith(("|", "#", "!")) else line for line in text.splitlines())
    sentences = re.split(r"[.:!?](?:\s|$)|\n\s*\n|\n(?=[-*\d])", text)
    long = [" ".join(said.split()) for said in sentences if len(said.split()) > LONGEST_SENTENCE]
    assert long == []


def leaf(words: tuple[str, ...]) -> tuple[Any, list[str]]:
    """The command of ``eagle3 WORDS``, and the words that it is given."""
    command: Any = get_command(app)
    rest = list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    return command, rest[: rest.index(">")] if ">" in rest else rest


@pytest.mark.parametrize(("page", "words"), commands("eagle3"), ids=str)
def test_every_command_that_is_named_is_understood(page: str, words: tuple[str, ...]) -> None:
    command, given = leaf(words)
    if words[0].startswith("--"):
        assert set(words) <= {name for parameter in command.params for name in parameter.opts} | {"--help"}, page
        return
    assert not hasattr(command, "commands"), f"{page}: no such command: eagle3 {' '.join(words)}"
    optional = [parameter for parameter in command.params if not parameter.required]
    if len(optional) < len(command.params) and not given:
        return  # spoken of, not called
    context = command.make_context(command.name, given)
    if changed := context.params.get("overrides"):
        build_round(load_round(round_file("smoke")).model_dump(mode="json"), parse_overrides(changed))
    known = set(descriptions()) if words[:2] == ("engines", "install") else ROUNDS | {None}
    assert context.params.get("name") in known, page


@pytest.mark.parametrize(("page", "words"), commands("prefect"), ids=str)
def test_every_deployment_and_command_of_prefect_exists(page: str, words: tuple[str, ...]) -> None:
    known = {entry.full_name for entry in catalogue()}
    assert words[:2] in {("deployment", "run"), ("worker", "start"), ("gcl", "update"), ("deployment", "schedule")}
    named = {word for word in words if re.fullmatch(r"[a-z0-9]+/[a-z0-9-]+", word)}
    assert named <= known, page
    parameters = {word.partition("=")[0] for word in words if re.match(r"\w+=", word)}
    assert parameters <= {"overrides", "extracting", "serving"}
    if "overrides" in parameters:
        [said] = [word.partition("=")[2] for word in words if word.startswith("overrides=")]
        build_round(load_round(round_file("smoke")).model_dump(mode="json"), yaml.safe_load(said))


@pytest.mark.parametrize(("page", "words"), commands("make"), ids=str)
def test_every_target_of_make_in_a_block_exists(page: str, words: tuple[str, ...]) -> None:
    known = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    if any(f"make {words[0]}" in block for block in fenced(PAGES[page], "bash")):
        assert set(words) <= known


def test_every_command_of_eagle3_is_told_of() -> None:
    group: Any = get_command(app)
    assert set(group.commands) <= {words[0] for _, words in commands("eagle3")}


def test_every_variable_that_is_named_is_read_and_the_other_way_round() -> None:
    whole = "".join(text for page, text in PAGES.items())
    named = {name for name in re.findall(r"EAGLE3_[A-Z_]+[A-Z]", whole) if not name.startswith("EAGLE3_ENV")}
    assert named - ELSEWHERE == {f"EAGLE3_{field.upper()}" for field in Settings.model_fields}


@pytest.mark.parametrize("page", PAGES)
def test_every_field_that_is_named_exists(page: str) -> None:
    known = FIELDS | {
        name.replace("engines.<engine>", f"engines.{one}") for name in FIELDS for one in ("vllm", "sglang")
    }
    known |= {".".join(name.split(".")[:depth]) for name in known for depth in range(1, 4)}
    named = {said.partition(":")[0] for said in code(PAGES[page])}
    dotted = {name for name in named if re.fullmatch(rf"({'|'.join(SECTIONS)})\.[a-z_<>.\[\]]+", name)}
    assert {name for name in dotted if not name.endswith((".py", ".json", ".md", ".yaml"))} <= known


def yaml_blocks() -> list[tuple[str, str]]:
    """(page, text) of every snippet of a round."""
    return [(page, text) for page, whole in PAGES.items() for text in fenced(whole, "yaml")]


@pytest.mark.parametrize(("page", "text"), yaml_blocks())
def test_every_snippet_makes_of_smoke_a_round(page: str, text: str) -> None:
    assert _changed(text).name == "smoke"


def test_the_yaml_for_gpus_is_a_round_for_eight() -> None:
    [text] = [text for text in fenced(PAGES["docs/gpu-box.md"], "yaml") if "tensor_parallel" in text]
    built = _changed(text)
    assert built.engines["sglang"].tensor_parallel == built.train.devices == 8
    assert len(built.engines["sglang"].ladder) == 2


def _changed(text: str) -> RoundConfig:
    """Smoke with the snippet's fields; a snippet that names engines names all that it uses."""
    changed: dict[str, Any] = yaml.safe_load(text)
    whole = load_round(round_file("smoke")).model_dump(mode="json")
    if "engines" in changed or "target" in changed:  # another target than smoke's has another shape
        whole["target"] = {"name": "another", "source": "hf://org/another@main"}
    whole |= {"engines": changed.pop("engines", whole["engines"])}
    for section, values in changed.items():
        whole[section] = {**whole[section], **values} if isinstance(values, dict) else values
    for engine in whole["engines"].values():  # snippets may ask for longer answers than smoke's engine takes
        engine["max_model_len"] = max(engine.get("max_model_len", 0), 2048)
    return build_round(whole)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_of_the_checkout_that_is_named_is_there(page: str) -> None:
    named = [said for said in code(PAGES[page]) if re.match(r"(infra|flows|tasks|tests|deployments|docs)/\S*$", said)]
    missing = [said for said in named if not re.search(r"[<*]|NAME", said) and not (CHECKOUT / said).exists()]
    assert [said for said in missing if not said.startswith("deployments/rounds/mine")] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    folder = (CHECKOUT / page).parent
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith("https://"):
            continue
        place, _, anchor = link.partition("#")
        file = (folder / place).resolve() if place else CHECKOUT / page
        assert file.is_file(), link
        assert not anchor or anchor in anchors(file), link


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", PAGES["README.md"])}
    assert {page for page in PAGES if page != "README.md"} <= linked


def test_the_fields_are_those_of_the_types() -> None:
    said = CliRunner().invoke(app, ["fields"])
    assert said.exit_code == 0
    assert PAGES["docs/round-fields.md"] == said.output, "eagle3 fields > docs/round-fields.md"


@pytest.mark.parametrize("name", ["train.epochs", "engines.<engine>.ladder[].flags", "gates.convention.reference"])
def test_the_fields_reach_every_depth(name: str) -> None:
    assert name in FIELDS


def test_a_bound_a_default_and_a_knob_are_told() -> None:
    page = PAGES["docs/round-fields.md"]
    assert "| `generate.concurrency` | whole number ≥ 1, ≤ 4096 | `32` | Requests in flight. **knob** |" in page
    assert '| `train.scheduler` | `linear` or `cosine` or `none` | `"cosine"` | Learning-rate schedule. |' in page
    assert "| `name` | text | must be given |" in page


def test_the_table_of_gates_has_each_gate() -> None:
    section = PAGES["docs/architecture.md"].split("\n## Gates\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| (\w+) \|", section, re.MULTILINE)) == {"gate", *get_args(Gate)}


MESSAGES = re.findall(r"^\| `([^|]+?)`(?:, `|[^|`]*\|)", PAGES["docs/troubleshooting.md"], re.MULTILINE)


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_that_is_explained_is_said(message: str) -> None:
    pieces = re.split(rf"\.\.\.|\b[NMK]\b|[+-]?\d+|\w+=\w+://|^(?:{'|'.join(get_args(Gate))}) gate: ", message)
    for piece in (piece.strip(" :;,") for piece in pieces):
        assert piece in SAID, piece


def _said() -> str:
    """Whatever the code says, strings that are parted over lines joined."""
    files = [file for folder in ("infra", "tasks", "deployments") for file in sorted((CHECKOUT / folder).rglob("*.py"))]
    text = "".join(file.read_text() for file in files) + (CHECKOUT / "deployments/bin/bootstrap.sh").read_text()
    return re.sub(r'"\s*\n\s*f?"', "", text.replace("{nobody}", "no living process"))


SAID = _said()
