"""A whole `tiny` round, every part real: vLLM on the CPU, Prefect server and worker (those of `eagle3 up`), trainer."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from standin.processes import living

from infra.config.settings import Settings
from infra.machine.host import free_port
from infra.machine.processes.guarded import recorded

EAGLE3 = Path(__file__).resolve().parents[2] / "deployments" / "bin" / "eagle3"
pytestmark = pytest.mark.timeout(900)


@dataclass
class RealMachine:
    """A user's machine with a state folder of its own."""

    settings: Settings
    env: dict[str, str]

    def living(self) -> list[int]:
        """Pids of this machine's processes, sorted."""
        return sorted(living(self.settings.state_dir))

    def eagle3(self, *arguments: str) -> Any:
        """What a command prints with --json."""
        done = subprocess.run(
            [str(EAGLE3), *arguments, "--json"], env=self.env, stdout=subprocess.PIPE, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
        return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, models: Path) -> RealMachine:
    base = tmp_path_factory.mktemp("machine")
    env = dict(os.environ) | {
        "HOME": str(base),
        "EAGLE3_CACHE_DIR": str(Settings().cache_dir),
        "EAGLE3_STATE_DIR": str(base / "state"),
        "EAGLE3_MODELS_PATH": str(models),
        "EAGLE3_API_PORT": str(free_port()),
    }
    settings = Settings(state_dir=base / "state", models_path=models)
    return RealMachine(settings, env)


@pytest.fixture(scope="module")
def stack(machine: RealMachine) -> Iterator[list[int]]:
    """Pids of the server and worker that every command here finds."""
    up = machine.eagle3("up")
    yield sorted([up["server_pid"], up["worker_pid"]])
    machine.eagle3("down")


@pytest.fixture(scope="module")
def first(machine: RealMachine, stack: list[int]) -> dict[str, Any]:
    """The first run of the round; its report."""
    plan = machine.eagle3("plan", "tiny")
    assert not any(step["done"] for step in plan["steps"])
    ran = machine.eagle3("round", "tiny")
    assert ran["state"] == "Completed"
    report: dict[str, Any] = ran["report"]
    return report | {"plan": plan}


def test_the_round_trains_a_draft_and_measures_it_in_serving(first: dict[str, Any]) -> None:
    assert first["training"]["steps"] == 20
    assert first["counts"]["samples"] >= 24
    measured = {item["prompts"]: item for item in first["evaluation"]["measured"]}
    assert set(measured) == {"heldout", "evaluation"}
    for item in measured.values():
        assert 1.0 <= item["acceptance"]["length"] <= 4.0
        assert item["acceptance"]["starts"] > 0
        assert item["plain"]["output_tokens"] > 0
    predicted = first["evaluation"]["predicted"]["acceptance"]["length"]
    assert measured["heldout"]["acceptance"]["length"] == pytest.approx(predicted, rel=0.1)


def test_every_step_did_its_work_and_left_no_process(
    first: dict[str, Any], machine: RealMachine, stack: list[int]
) -> None:
    steps = {item["step"]: item for item in first["steps"]}
    assert list(steps) == [
        *(
            "plan",
            "preflight",
            "generate",
            "prepare",
            "convention",
            "extract",
            "verify",
            "cleanup",
            "train",
            "evaluate",
        ),
        *("publish", "cleanup after"),
    ]
    assert not any(item["reused"] for item in steps.values())
    assert machine.living() == stack
    assert recorded(machine.settings.run_dir) == []


def test_the_plan_said_what_the_round_would_need(first: dict[str, Any]) -> None:
    assert first["used_disk_bytes"] == pytest.approx(first["plan"]["disk_bytes"], rel=0.25)


def test_the_published_draft_names_no_path_of_this_machine(first: dict[str, Any], machine: RealMachine) -> None:
    folder = Path(first["published"].removeprefix("file://"))
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "README.md"}
    for name in ("config.json", "README.md"):
        text = (folder / name).read_text()
        assert str(machine.settings.state_dir) not in text
        assert str(machine.settings.models_dir) not in text
    assert json.loads((folder / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]


def test_the_states_went_by_policy_and_the_samples_stayed(first: dict[str, Any], machine: RealMachine) -> None:
    rounds = machine.settings.state_dir / "store" / "rounds" / "tiny"
    assert not list((rounds / "hidden").glob("*/*/*.safetensors"))
    assert list((rounds / "samples").glob("*/part-*.parquet"))


def test_the_same_round_again_does_nothing_twice(first: dict[str, Any], machine: RealMachine) -> None:
    store = machine.settings.state_dir / "store"
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()}
    engines = set(machine.settings.log_dir.glob("vllm-*"))
    again = machine.eagle3("round", "tiny")
    assert set(machine.settings.log_dir.glob("vllm-*")) == engines, "no engine was started"
    assert again["state"] == "Completed"
    assert again["report"]["draft"] == first["draft"]
    after = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()}
    assert after == before
    assert all(step["done"] for step in machine.eagle3("plan", "tiny")["steps"])


def test_what_is_brought_down_leaves_no_process(machine: RealMachine, first: dict[str, Any]) -> None:
    assert machine.eagle3("down") == {"stopped": True}
    assert machine.living() == []
