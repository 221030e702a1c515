"""Servers that are wrong on purpose; they end with this folder's last test, for each holds 2 GB."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standin.real_engines import Planted, extracting, smoke

from infra.config.settings import Settings
from infra.engines.vllm.engine import PLUGIN
from infra.round.serving import Serving

PLANTED = Path(__file__).parent / "planted"
SHIFTED_IDS = [3, 16, 28, 30]
FLAGS = ["--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)]
"""Few sequences are asked of them; what every round gives a server is 2 GiB."""


@pytest.fixture(scope="package")
def shifted(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """vLLM whose rung makes it capture other layers than were asked for: the last flag wins."""
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": SHIFTED_IDS}},
    }
    rung = {"name": "shifted", "flags": [*FLAGS, "--speculative-config", json.dumps(speculation)]}
    settings = Settings(state_dir=tmp_path_factory.mktemp("shifted"), models_path=models)
    with extracting(smoke("vllm", settings, {"engines.vllm.ladder": [rung]})) as serving:
        yield serving


@pytest.fixture(scope="package")
def planted(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    """vLLM in bfloat16, with the connector of ``planted/``."""
    folder = tmp_path_factory.mktemp("planted")
    settings = Settings(state_dir=folder / "state", models_path=models)
    plain = smoke("vllm", settings)
    transfer: dict[str, Any] = {
        "kv_connector": "PlantedConnector",
        "kv_connector_module_path": "planted_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(plain.scratch / "staging")},
    }
    env = {
        "PYTHONPATH": f"{PLUGIN}:{PLANTED}",
        "PLANTED_FAULT": str(folder / "fault"),
        "PLANTED_TARGET": str(plain.target.path),
    }
    flags = [*FLAGS, "--kv-transfer-config", json.dumps(transfer)]
    rung = {"name": "planted", "flags": flags, "env": env}
    (folder / "fault").write_text("")
    context = smoke("vllm", settings, {"engines.vllm.ladder": [rung], "engines.vllm.dtype": "bfloat16"})
    with extracting(context) as serving:
        yield Planted(serving, folder / "fault")
