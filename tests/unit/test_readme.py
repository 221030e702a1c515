"""What the README says of rounds, commands and variables, against the code."""

import re
from typing import Any

import pytest
import yaml

from deployments.cli.app import app
from infra.config.load import build_round, load_round, round_file
from infra.config.settings import Settings

README = (round_file("smoke").parents[2] / "README.md").read_text()
ELSEWHERE = {"EAGLE3_FLOWS", "EAGLE3_ROOT"}
"""Read before there are settings: in deployments/bin, and where the checkout is looked for."""


def test_the_yaml_for_gpus_turns_smoke_into_a_round() -> None:
    [text] = re.findall(r"In a copy of `smoke\.yaml`.*?```yaml\n(.*?)```", README, re.DOTALL)
    changed: dict[str, Any] = yaml.safe_load(text)
    fields = load_round(round_file("smoke")).model_dump(mode="json")
    engines = changed.pop("engines")
    fields |= {"engines": engines, "target": {"name": "another", "source": "hf://org/another@main"}}
    for section, values in changed.items():
        fields[section] = {**fields[section], **values} if isinstance(values, dict) else values
    round_ = build_round(fields)
    assert round_.engines["sglang"].tensor_parallel == round_.train.devices == 8
    assert len(round_.engines["sglang"].ladder) == 2


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^eagle3 (\w+)|`eagle3 (\w+)", README, re.MULTILINE))))
def test_every_command_that_is_named_exists(command: tuple[str, str]) -> None:
    known = {item.name or item.callback.__name__ for item in app.registered_commands if item.callback}
    known |= {str(item.name) for item in app.registered_groups}
    assert "".join(command) in known


def test_every_variable_that_is_named_is_read_and_the_other_way_round() -> None:
    named = {name for name in re.findall(r"EAGLE3_[A-Z_]+[A-Z]", README) if not name.startswith("EAGLE3_ENV")}
    assert named - ELSEWHERE == {f"EAGLE3_{field.upper()}" for field in Settings.model_fields}
