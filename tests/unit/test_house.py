"""Rules of the house that no linter knows; who may import whom is checked by `lint-imports` (pyproject.toml)."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from infra.config.round import ENGINES
from infra.engines.registry import as_trained, find_engine
from infra.environments.descriptions import descriptions

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks", "infra", "deployments")
LONGEST = 350


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_file_is_two_ideas() -> None:
    counts = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(*PACKAGES)}
    assert len(counts) > 150
    assert {path: count for path, count in counts.items() if count > LONGEST} == {}


def test_no_module_of_flows_hides_another() -> None:
    """Prefect puts the folder on sys.path, where a module would take the place of an equally named one."""
    taken = {*sys.stdlib_module_names, *packages_distributions(), *PACKAGES}
    names = {path.stem for path in sources("flows") if path.stem != "__init__"}
    assert "eagle3" in names
    assert names & taken == set()


def test_plugins_import_nothing_of_ours() -> None:
    """They run inside an engine's environment, which has none of it."""
    plugins = sources("infra/engines/plugins")
    assert len(plugins) > 5
    ours = tuple(f"{verb} {package}{end}" for verb in ("from", "import") for package in PACKAGES for end in (".", " "))
    for path in plugins:
        lines = [line.strip() for line in path.read_text().splitlines()]
        assert [line for line in lines if f"{line} ".startswith(ours)] == [], path


def test_only_engines_and_rounds_name_an_engine() -> None:
    """Whatever differs between engines is asked of the engine's folder; words for people are made from its title."""
    outside = [
        path
        for path in sources("flows", "tasks", "infra")
        if not path.is_relative_to(ROOT / "infra/engines") and not path.is_relative_to(ROOT / "infra/config")
    ]
    assert len(outside) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in outside
        for line, text in texts(ast.parse(path.read_text()))
        if any(name in text.lower() for name in ENGINES)
    ]
    assert found == []


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of each string that is no docstring: one that is a statement of its own is read by people alone."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.lineno, node.value


def test_every_engine_is_a_folder_that_knows_of_no_other() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    apart = next(contract["modules"] for contract in contracts if contract["type"] == "independence")
    for name in ENGINES:
        engine = find_engine(name)
        assert f"infra.engines.{name}" in apart
        assert (engine.name, engine.numbering.engine) == (name, name)
        assert any(environment.startswith(f"{name}-") for environment in descriptions())
    assert as_trained(), "something must load a draft as the trainer writes it"


@pytest.mark.parametrize(
    "arguments", [["-m", "infra.environments", "status"], ["-c", "import infra.machine.processes.guard"]]
)
def test_bare_python_is_enough(arguments: list[str], tmp_path: Path) -> None:
    """Environments are built, and guards run, where nothing is installed."""
    environment = {"PYTHONPATH": str(ROOT), "EAGLE3_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-S", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
