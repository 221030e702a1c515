"""Every deployment this project has, and ``prefect.yaml``, which is rendered from them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from deployments.environment import CODE, POOL, checkout
from infra.config.keys import key12
from infra.config.load import load_round
from infra.errors import ConfigError

PREFECT_YAML = CODE / "deployments" / "prefect.yaml"
PARITY_ROUND = CODE / "deployments" / "rounds" / "smoke-sglang.yaml"
"""Describes both engines; its target, taps and prompts are what `parity/engines` compares on unless told otherwise."""
PULL: list[dict[str, Any]] = [{"prefect.deployments.steps.set_working_directory": {"directory": "{{ $EAGLE3_ROOT }}"}}]
TAG = "eagle3"
"""On every deployment, and so on its runs: the automation that ends silent runs looks at no others."""
JOB_VARIABLES: dict[str, Any] = {"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}}
"""That automation counts on a heartbeat every 30 s (Prefect's least), whoever's worker runs the flow."""
HEADER = """\
# Rendered from deployments/rounds/*.yaml by `eagle3 deploy --render`; change those, not this.
# From the root of the checkout, with a server that has the work pool `eagle3` and, for rounds on GPUs, their slot
# (`prefect gcl create gpu --limit 1`):
#   prefect deploy --prefect-file deployments/prefect.yaml --all
# A worker finds the code through EAGLE3_ROOT, the path of the checkout (`eagle3 up` sets it for its own worker).
"""


@dataclass(frozen=True)
class Entry:
    """One deployment, in Prefect's words."""

    flow: str
    name: str
    description: str
    parameters: dict[str, Any]
    tags: tuple[str, ...]
    cron: str | None = None
    entrypoint: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entrypoint", f"flows/{self.flow}.py:{self.flow}")

    @property
    def full_name(self) -> str:
        """``flow/name``, as ``prefect deployment run`` wants it."""
        return f"{self.flow}/{self.name}"

    @property
    def version(self) -> str:
        """12 hex digits that change with what the deployment runs."""
        return key12(
            entrypoint=self.entrypoint, parameters=self.parameters, tags=self.tags, job_variables=JOB_VARIABLES
        )


def round_entry(file: Path) -> Entry:
    """The deployment of a round's file.

    Raises:
        ConfigError: the file is not a valid round, or bears another name than its round.
    """
    config = load_round(file)
    if config.name != file.stem:
        raise ConfigError(
            f"{file.name} describes a round called {config.name!r}",
            expected=f"name: {file.stem}, as the file is called",
            fix="rename the file or the round",
        )
    return Entry(
        flow="eagle3",
        name=config.name,
        description=config.description,
        parameters={"config": config.model_dump(mode="json"), "overrides": {}},
        tags=(TAG, f"target:{config.target.name}"),
    )


def catalogue(root: Path | None = None) -> list[Entry]:
    """All deployments: one a round file, the comparison of engines, and the nightly ones (not enabled at first)."""
    folder = (root or checkout()) / "deployments" / "rounds"
    rounds = [round_entry(file) for file in sorted(folder.glob("*.yaml"))]
    return [
        *rounds,
        Entry(
            flow="parity",
            name="engines",
            description="Compares hidden states and tokenisers of two engines, or of two versions before an upgrade.",
            parameters={
                "config": load_round(PARITY_ROUND).model_dump(mode="json"),
                "extracting": {"engine": "vllm", "environment": ""},
                "serving": {"engine": "sglang", "environment": ""},
                "samples": 8,
                "overrides": {},
            },
            tags=(TAG, "parity"),
        ),
        Entry(
            flow="reextract",
            name="nightly",
            description="Re-extracts hidden states that no longer match their target, engine, template or taps.",
            parameters={},
            tags=(TAG, "nightly"),
            cron="0 3 * * *",
        ),
        Entry(
            flow="cleanup",
            name="nightly",
            description="Deletes what dead runs left and what the retention policy of each round allows.",
            parameters={"dry_run": False},
            tags=(TAG, "nightly"),
            cron="0 5 * * *",
        ),
    ]


def render(entries: list[Entry]) -> str:
    """Text of ``prefect.yaml`` for these deployments."""
    document = {"name": "eagle3", "pull": PULL, "deployments": [_block(entry) for entry in entries]}
    return HEADER + yaml.dump(document, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)


def _block(entry: Entry) -> dict[str, Any]:
    block: dict[str, Any] = {
        "name": entry.name,
        "version": entry.version,
        "description": entry.description,
        "tags": list(entry.tags),
        "entrypoint": entry.entrypoint,
        "parameters": entry.parameters,
        "work_pool": {"name": POOL, "job_variables": JOB_VARIABLES},
        "concurrency_limit": {"limit": 1, "collision_strategy": "ENQUEUE"},
    }
    if entry.cron:
        block["schedules"] = [{"cron": entry.cron, "timezone": "UTC", "slug": "nightly", "active": False}]
    return block


class _Plain(yaml.SafeDumper):
    """No anchors: every deployment can be read and copied by itself."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
