"""``eagle3 front`` as a process, with the stand-in engine: what it prints, what it serves, that Ctrl-C ends all."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import yaml
from safetensors.torch import load_file
from standin.machine import REPOSITORY, Machine, Use, new_machine

from infra.config.settings import Settings
from infra.machine.processes.guarded import recorded

CHILD = """
import sys
from standin.engine import StandInEngine
from infra.engines.vllm import engine as vllm
vllm.ENGINE = StandInEngine()
from deployments.cli.app import main
sys.exit(main())
"""


def start(machine: Machine, *arguments: str) -> "subprocess.Popen[str]":
    """The command on the small round of this machine."""
    path = machine.folder / "small.yaml"
    path.write_text(yaml.safe_dump(machine.fields))
    env = {**os.environ, **machine.environment, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    command = [sys.executable, "-c", CHILD, "front", str(path), *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def told(child: "subprocess.Popen[str]") -> dict[str, object]:
    """The facts that it prints as JSON, when it has printed them all."""
    assert child.stdout is not None
    text = ""
    for line in child.stdout:
        text += line
        if line == "}\n":
            found: dict[str, object] = json.loads(text)
            return found
    raise AssertionError(f"it ended with {child.wait()}: {child.communicate()[1][-2000:]}")


def test_a_round_without_samples_is_served_until_interrupted(tmp_path: Path, use: Use) -> None:
    machine = use(new_machine(tmp_path))
    child = start(machine, "--json")
    try:
        facts = told(child)
        target = str(Settings().models_dir / machine.fields["target"]["name"])
        assert facts["model"] == target
        assert facts["dataset"] is None
        reply = httpx.post(
            f"{facts['address']}/v1/completions", json={"prompt": [1, 2, 3], "model": target}, timeout=60
        )
        states = load_file(reply.json()["kv_transfer_params"]["hidden_states_path"])
        assert states["hidden_states"].shape == (3, 4, 64)
        assert httpx.get(f"{facts['address']}/health").json()["status"] == "ok"
    finally:
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert "1 requests were answered" in errors
    assert recorded(Settings().run_dir) == []


def test_prepared_samples_are_handed_to_speculators_and_a_dead_engine_ends_it(again: Machine) -> None:
    child = start(again, "--json", "--set", "extract.concurrency=3")
    facts = told(child)
    commands = facts["commands"]
    assert isinstance(commands, dict)
    generate = commands["generate-offline-data"]
    assert generate[1:4] == ["generate-offline-data", "--endpoint", f"{facts['address']}/v1"]
    assert generate[generate.index("--preprocessed-data") + 1] == facts["dataset"]
    assert (Path(str(facts["dataset"])) / "dataset_info.json").is_file()
    assert commands["train"][-1] == "DRAFT"
    [server] = recorded(Settings().run_dir)
    os.kill(server.child_pid, signal.SIGKILL)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "killed by signal 9" in errors
    assert recorded(Settings().run_dir) == []
