"""deployments/prefect.yaml is what the round files say, in a form that Prefect reads."""

from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest
import yaml

from deployments.automations import load_automations
from deployments.catalogue import PREFECT_YAML, TAG, catalogue, render, round_entry
from deployments.environment import CODE
from infra.config.load import ROUNDS, load_round
from infra.config.round import RoundConfig
from infra.errors import ConfigError

SHIPPED = sorted(ROUNDS.glob("*.yaml"))
ROUND = """
name: {name}
target: {{name: some-target}}
extract: {{taps: [1, 2]}}
engines: {{vllm: {{device: cpu}}}}
"""


def write_round(root: Path, file: str, name: str) -> Path:
    path = root / "deployments" / "rounds" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ROUND.format(name=name))
    return path


def test_the_committed_file_equals_its_rendering() -> None:
    assert PREFECT_YAML.read_text() == render(catalogue(CODE)), "run: eagle3 deploy --render"


def test_prefect_reads_it() -> None:
    from prefect.cli.deploy._models import PrefectYamlModel

    model = PrefectYamlModel.model_validate(yaml.safe_load(PREFECT_YAML.read_text()))
    names = {f"{item.entrypoint.split(':')[1]}/{item.name}" for item in model.deployments if item.entrypoint}
    rounds = {f"eagle3/{file.stem}" for file in SHIPPED}
    assert names == rounds | {"parity/engines", "reextract/nightly", "cleanup/nightly"}
    assert len(model.deployments) == len(names)
    for item in model.deployments:
        assert item.model_dump()["work_pool"]["name"] == "eagle3"
        limit = item.model_dump()["concurrency_limit"]
        assert (limit["limit"], limit["collision_strategy"]) == (1, "ENQUEUE")
    nightly = [item for item in model.deployments if item.name == "nightly"]
    assert all(item.model_dump()["schedules"][0]["active"] is False for item in nightly)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_each_round_deploys_its_whole_resolved_config(file: Path) -> None:
    assert RoundConfig.model_validate(round_entry(file).parameters["config"]) == load_round(file)


def test_the_silence_automation_looks_at_this_projects_runs_alone_and_they_beat_in_time() -> None:
    [automation] = load_automations()
    trigger = automation.model_dump(mode="json")["trigger"]
    assert trigger["match_related"] == {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
    for item in yaml.safe_load(PREFECT_YAML.read_text())["deployments"]:
        assert TAG in item["tags"]
        beat = int(item["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
        assert 3 * beat <= trigger["within"]


def test_it_names_no_path_of_a_machine() -> None:
    assert str(CODE) not in PREFECT_YAML.read_text()
    assert "{{ $EAGLE3_ROOT }}" in PREFECT_YAML.read_text()


def test_a_new_round_file_is_a_new_deployment(tmp_path: Path) -> None:
    write_round(tmp_path, "mine.yaml", "mine")
    assert [entry.full_name for entry in catalogue(tmp_path)] == [
        "eagle3/mine", "parity/engines", "reextract/nightly", "cleanup/nightly",
    ]  # fmt: skip


def test_the_version_changes_with_the_round_and_only_then(tmp_path: Path) -> None:
    file = write_round(tmp_path, "mine.yaml", "mine")
    before = round_entry(file).version
    file.write_text(file.read_text() + "# a comment\n")
    assert round_entry(file).version == before
    file.write_text(file.read_text() + "train: {epochs: 9}\n")
    assert round_entry(file).version != before


def test_a_round_in_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    file = write_round(tmp_path, "mine.yaml", "yours")
    with pytest.raises(ConfigError, match=r"mine\.yaml describes a round called 'yours'"):
        round_entry(file)


def test_silent_runs_become_crashed_after_three_missed_heartbeats() -> None:
    [automation] = load_automations()
    rules = automation.model_dump(mode="json")
    assert rules["trigger"]["posture"] == "Proactive"
    assert rules["trigger"]["within"] == 90
    assert rules["trigger"]["after"] == ["prefect.flow-run.heartbeat"]
    assert "prefect.flow-run.Cancelling" not in rules["trigger"]["expect"], "a run may die while it is being cancelled"
    assert [(action["type"], action["state"]) for action in rules["actions"]] == [("change-flow-run-state", "CRASHED")]


@pytest.mark.parametrize(
    ("tags", "watched"),
    [
        ((TAG, "target:any"), True),
        ((TAG, "nightly"), True),
        (("nightly",), False),
        (("eagle3-like",), False),
        ((), False),
    ],
)
def test_prefects_server_matches_runs_of_this_projects_deployments_alone(tags: tuple[str, ...], watched: bool) -> None:
    """By the server's own reading of the trigger, and the related resources that its events of a run have."""
    from prefect.events.related import tags_as_related_resources
    from prefect.server.events.schemas.automations import EventTrigger
    from prefect.server.events.schemas.events import ReceivedEvent

    [automation] = load_automations()
    trigger = EventTrigger.model_validate(automation.trigger.model_dump(mode="json"))
    related = [{"prefect.resource.id": f"prefect.flow.{uuid4()}", "prefect.resource.role": "flow"}]
    related += [item.model_dump() for item in tags_as_related_resources(tags)]
    for name in ("heartbeat", "Completed", "Cancelled"):
        event = ReceivedEvent.model_validate(
            {
                "occurred": datetime.now(UTC),
                "id": uuid4(),
                "event": f"prefect.flow-run.{name}",
                "resource": {"prefect.resource.id": f"prefect.flow-run.{uuid4()}"},
                "related": related,
            }
        )
        assert trigger.covers(event) is watched
