"""Keeps the automations of ``automations.yaml`` in place on a Prefect server."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.schemas.automations import AutomationCore

FILE = Path(__file__).with_name("automations.yaml")


def load_automations(file: Path = FILE) -> "list[AutomationCore]":
    """The automations of a file, validated by Prefect's own types."""
    from prefect.events.schemas.automations import AutomationCore

    document = yaml.safe_load(file.read_text())
    return [AutomationCore.model_validate(item) for item in document["automations"]]


def ensure_automations(client: "SyncPrefectClient", wanted: "list[AutomationCore]") -> None:
    """Create what is missing and update what differs, by name; whether one is enabled stays the user's choice."""
    for automation in wanted:
        present = client.read_automations_by_name(automation.name)
        if not present:
            client.create_automation(automation)
            continue
        if _rules(present[0]) != _rules(automation):
            client.update_automation(present[0].id, automation.model_copy(update={"enabled": present[0].enabled}))


def _rules(automation: "AutomationCore") -> dict[str, Any]:
    rules = automation.model_dump(mode="json", include={"description", "trigger", "actions"})
    rules["trigger"].pop("id", None)
    for name in ("expect", "after", "for_each"):
        rules["trigger"][name] = sorted(rules["trigger"].get(name) or [])
    return rules
