"""The project as a package: what it requires, what it calls itself, what it runs in."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import infra
from deployments.environment import stand_in_for_flows
from infra.environments.building import default_cache, environment_folder, environment_python
from infra.environments.descriptions import LOCKS, descriptions, pins

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
REQUIRED = [Requirement(line) for line in PROJECT["dependencies"]]
FOR_TESTS = [Requirement(line) for line in PROJECT["optional-dependencies"]["test"]]
PINNED = {
    name: version
    for file in (*descriptions()["flows"].locks, descriptions()["flows"].torch[0])
    for name, version in pins(LOCKS / file).items()
}
THROUGH = {"httpx2": "huggingface-hub", "botocore": "s3fs", "pydantic-core": "pydantic"}
"""Imported, and brought by a requirement that decides its version."""


@pytest.mark.parametrize("requirement", [*REQUIRED, *FOR_TESTS], ids=lambda requirement: requirement.name)
def test_what_is_required_admits_what_is_pinned(requirement: Requirement) -> None:
    assert requirement.specifier, "a requirement without a bound"
    assert requirement.specifier.contains(PINNED[requirement.name])


def test_whatever_is_imported_is_required() -> None:
    distributions = packages_distributions()
    imported = set[str]()
    for package in ("flows", "tasks", "infra", "deployments"):
        for path in (CHECKOUT / package).rglob("*.py"):
            if "plugins" in path.parts:  # they run in the engines' environments
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.partition(".")[0])
    needed = {distributions[name][0].lower().replace("_", "-") for name in imported if name in distributions}
    needed = {THROUGH.get(name, name) for name in needed} - {PROJECT["name"]}
    assert needed - {requirement.name for requirement in REQUIRED} == set()


def test_a_torchvision_of_another_torch_is_passed_over(tmp_path: Path) -> None:
    for name in ("torchvision", "torchaudio"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    code = "import importlib.util as u; print([u.find_spec(name) for name in ('torchvision', 'torchaudio')])"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}"}

    def run(code: str) -> str:
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout

    assert "ModuleSpec" in run(code)
    assert run(f"import infra; {code}") == "[None, None]\n"


def test_the_version_is_said() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", infra.__version__)
    done = subprocess.run(
        [sys.executable, "-m", "deployments.cli", "--version"], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"eagle3 {infra.__version__}\n"


def test_a_users_own_environment_is_that_of_the_flows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_ENV_FLOWS", "")
    monkeypatch.delenv("EAGLE3_ENV_FLOWS")
    locked = environment_folder("flows", default_cache())
    monkeypatch.setattr(sys, "prefix", str(locked))
    stand_in_for_flows()
    assert "EAGLE3_ENV_FLOWS" not in os.environ, "the locked one needs no stand-in"

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    stand_in_for_flows()
    assert "EAGLE3_ENV_FLOWS" not in os.environ, "no environment: it has no bin/python"

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    stand_in_for_flows()
    assert environment_python("flows", default_cache()) == tmp_path / "bin" / "python"

    monkeypatch.setenv("EAGLE3_ENV_FLOWS", "/chosen")
    stand_in_for_flows()
    assert os.environ["EAGLE3_ENV_FLOWS"] == "/chosen"
