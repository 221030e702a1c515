"""The rules of the house, read from the source: who may import whom, how long a file may be, which names are taken.

Every rule is also shown a tree that breaks it.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

Rule = Callable[[Path], list[str]]

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 350
OURS = {
    "infra": {"infra"},
    "tasks": {"infra", "tasks"},
    "flows": {"infra", "tasks", "flows"},
    "deployments": {"infra", "tasks", "flows", "deployments"},
}
"""For each package, the packages of ours it may import."""
BASE = {"errors", "config", "machine"}
PARTS = {
    "errors": set(),
    "config": {"errors"},
    "machine": BASE,
    "store": BASE | {"store"},
    "engines": BASE | {"store", "engines"},
    "drafter": BASE | {"store", "drafter"},
    "data": BASE | {"store", "data"},
    "report": BASE | {"report", "steps.results"},
    "steps": BASE | {"store", "engines", "drafter", "data", "report", "steps"},
}
"""For each part of infra, the parts it may import besides itself."""
STDLIB_ONLY = ("infra/environments/building.py", "infra/machine/processes/guard.py")
"""Files that run under a bare Python, before any environment exists."""
PLUGINS = "infra/engines/plugins"


def sources(root: Path, package: str) -> list[Path]:
    """The Python files of one package."""
    return sorted((root / package).rglob("*.py"))


def imports(root: Path, path: Path) -> Iterator[str]:
    """Dotted names that a file imports, anywhere in it; ``from a import b`` is ``a.b``."""
    package = path.relative_to(top_of(root, path)).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join((*base, node.module) if node.module else base)
            yield from (f"{start}.{alias.name}" for alias in node.names)


def top_of(root: Path, path: Path) -> Path:
    """The folder from which a file's package is imported: the root, or a plugin's own distribution."""
    plugins = root / PLUGINS
    return plugins / path.relative_to(plugins).parts[0] if path.is_relative_to(plugins) else root


def within(name: str, prefix: str) -> bool:
    """Whether a dotted name is ``prefix`` or lies in it."""
    return name == prefix or name.startswith(f"{prefix}.")


def wrong_way(root: Path) -> list[str]:
    """Imports of our packages that go up, and everything of ours that a plugin imports."""
    faults = []
    for package, allowed in OURS.items():
        for path in sources(root, package):
            reach = set() if path.is_relative_to(root / PLUGINS) else allowed
            forbidden = OURS.keys() - reach
            faults += [
                f"{path.relative_to(root)}: {name}" for name in imports(root, path) if name.split(".")[0] in forbidden
            ]
    return faults


def prefect_in_infra(root: Path) -> list[str]:
    """Prefect imports in infra."""
    return [
        f"{path.relative_to(root)}: {name}"
        for path in sources(root, "infra")
        for name in imports(root, path)
        if name.split(".")[0].startswith("prefect")
    ]


def parts_mixed(root: Path) -> list[str]:
    """Imports between parts of infra that only ``infra/steps`` may combine."""
    faults = []
    for path in sources(root, "infra"):
        if path.is_relative_to(root / PLUGINS) or path == root / "infra/__init__.py":
            continue
        part = path.relative_to(root / "infra").with_suffix("").parts[0]
        allowed = PARTS[part] | {part}
        faults += [
            f"{path.relative_to(root)}: {name}"
            for name in imports(root, path)
            if within(name, "infra") and not any(within(name, f"infra.{other}") for other in allowed)
        ]
    return faults


def beyond_stdlib(root: Path, start: str) -> list[str]:
    """What a file, and the files of ours it imports, import from outside the standard library."""
    faults, seen, waiting = [], set(), [root / start]
    while waiting:
        path = waiting.pop()
        seen.add(path)
        for name in imports(root, path):
            if name.split(".")[0] in sys.stdlib_module_names:
                continue
            ours = [found for found in files_of(root, name) if found not in seen]
            waiting += ours
            if not within(name, "infra"):
                faults.append(f"{path.relative_to(root)}: {name}")
    return faults


def files_of(root: Path, name: str) -> list[Path]:
    """Our files that importing a dotted name runs: packages on the way, and the module."""
    parts = name.split(".")
    steps = [root.joinpath(*parts[: end + 1]) for end in range(len(parts))]
    return [path for step in steps for path in (step / "__init__.py", step.with_suffix(".py")) if path.is_file()]


def too_long(root: Path) -> list[str]:
    """Files of more than LONGEST lines."""
    counts = {path: len(path.read_text().splitlines()) for package in OURS for path in sources(root, package)}
    return [f"{path.relative_to(root)}: {count} lines" for path, count in counts.items() if count > LONGEST]


@cache
def installed() -> frozenset[str]:
    """Top-level names that this environment's distributions provide."""
    return frozenset(packages_distributions())


def shadowing(root: Path) -> list[str]:
    """Modules in flows/ (Prefect puts that folder on sys.path) named like something that others import."""
    taken = sys.stdlib_module_names | installed() | OURS.keys()
    return [
        path.name for path in sorted((root / "flows").iterdir()) if path.stem in taken and path.suffix in ("", ".py")
    ]


def postponed_annotations(root: Path) -> list[str]:
    """Modules in flows/ with ``from __future__ import annotations``, which breaks serving a flow."""
    return [path.name for path in sources(root, "flows") if "__future__.annotations" in imports(root, path)]


def pyplot(root: Path) -> list[str]:
    """Uses of pyplot, whose figures are global state."""
    return [
        f"{path.relative_to(root)}"
        for package in OURS
        for path in sources(root, package)
        if any(within(name, "matplotlib.pyplot") for name in imports(root, path))
    ]


def write(root: Path, files: dict[str, str]) -> Path:
    """A small tree with the four packages and these files."""
    for path, text in ({f"{package}/__init__.py": "" for package in OURS} | files).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


RULES = (wrong_way, prefect_in_infra, parts_mixed, too_long, shadowing, postponed_annotations, pyplot)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: Rule) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize("path", STDLIB_ONLY)
def test_bare_python_is_enough(path: str) -> None:
    assert beyond_stdlib(ROOT, path) == []


def test_the_rules_see_the_whole_house() -> None:
    assert all(len(sources(ROOT, package)) > 1 for package in OURS)


@pytest.mark.parametrize(
    ("rule", "path", "text", "fault"),
    [
        (wrong_way, "infra/store/a.py", "from tasks.x import y", "infra/store/a.py: tasks.x.y"),
        (wrong_way, "tasks/a.py", "def f():\n    import flows.eagle3", "tasks/a.py: flows.eagle3"),
        (wrong_way, "flows/a.py", "import deployments", "flows/a.py: deployments"),
        (wrong_way, f"{PLUGINS}/p/p/a.py", "from infra.errors import E", f"{PLUGINS}/p/p/a.py: infra.errors.E"),
        (prefect_in_infra, "infra/store/a.py", "from prefect import task", "infra/store/a.py: prefect.task"),
        (prefect_in_infra, "infra/a.py", "import prefect_shell", "infra/a.py: prefect_shell"),
        (parts_mixed, "infra/engines/a.py", "from infra.drafter import b", "infra/engines/a.py: infra.drafter.b"),
        (parts_mixed, "infra/store/a.py", "from ..engines.b import c", "infra/store/a.py: infra.engines.b.c"),
        (parts_mixed, "infra/report/a.py", "import infra.steps.plan", "infra/report/a.py: infra.steps.plan"),
        (parts_mixed, "infra/config/a.py", "from infra import machine", "infra/config/a.py: infra.machine"),
        (too_long, "tasks/a.py", "x = 1\n" * (LONGEST + 1), f"tasks/a.py: {LONGEST + 1} lines"),
        (shadowing, "flows/json.py", "", "json.py"),
        (shadowing, "flows/pydantic.py", "", "pydantic.py"),
        (shadowing, "flows/yaml/__init__.py", "", "yaml"),
        (postponed_annotations, "flows/a.py", "from __future__ import annotations", "a.py"),
        (pyplot, "infra/report/a.py", "from matplotlib import pyplot as p", "infra/report/a.py"),
    ],
)
def test_a_broken_rule_is_seen(tmp_path: Path, rule: Rule, path: str, text: str, fault: str) -> None:
    assert rule(write(tmp_path, {path: text})) == [fault]


@pytest.mark.parametrize(
    "files",
    [
        {"flows/a.py": "from tasks.b import c\nfrom infra.steps.d import e\nimport prefect"},
        {"infra/steps/a.py": "from infra.engines.b import c\nfrom infra.drafter.d import e\nfrom . import results"},
        {"infra/data/a.py": "from infra.store.b import c\nfrom .d import e\nfrom infra.config.round import f"},
        {"infra/report/a.py": "from infra.results import Report\nfrom matplotlib.figure import Figure"},
        {f"{PLUGINS}/p/p/a.py": "import torch\nfrom . import b"},
        {"tasks/a.py": "x = 1\n" * LONGEST, "flows/evaluation.py": "", "flows/__pycache__/json.py": ""},
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, files: dict[str, str]) -> None:
    root = write(tmp_path, files)
    assert [fault for rule in RULES for fault in rule(root)] == []


@pytest.mark.parametrize(
    ("files", "faults"),
    [
        ({"infra/a.py": "import os\nfrom infra.errors import E", "infra/errors.py": "import json"}, []),
        ({"infra/a.py": "def f():\n    import torch"}, ["infra/a.py: torch"]),
        ({"infra/a.py": "from infra.b import c", "infra/b.py": "import yaml"}, ["infra/b.py: yaml"]),
        ({"infra/a.py": "from infra.b.c import d", "infra/b/__init__.py": "import httpx", "infra/b/c.py": ""},
         ["infra/b/__init__.py: httpx"]),
        ({"infra/a.py": "import tasks"}, ["infra/a.py: tasks"]),
    ],
)  # fmt: skip
def test_the_closure_of_imports_counts(tmp_path: Path, files: dict[str, str], faults: list[str]) -> None:
    assert beyond_stdlib(write(tmp_path, files), "infra/a.py") == faults
