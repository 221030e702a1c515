"""Rules of the house that no linter knows; who may import whom is checked by `lint-imports` (pyproject.toml)."""

import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

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
