"""speculators' own command makes its files from our extraction, over HTTP, with a real engine on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from standin.real_engines import SAMPLES

from infra.drafter.job import CPU_ARGUMENTS
from infra.engines.client.extraction import Extractor
from infra.engines.client.front import Front
from infra.round.context import RoundContext
from infra.round.serving import Serving

pytestmark = pytest.mark.timeout(900)
REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def serving(request: pytest.FixtureRequest) -> Serving:
    found: Serving = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def context(serving: Serving) -> RoundContext:
    return serving.context


@pytest.fixture(scope="module")
def extractor(serving: Serving) -> Extractor:
    return serving.extractor(600)


@pytest.fixture(scope="module")
def sequences(context: RoundContext) -> list[list[int]]:
    return [context.chat.render(prompt.messages) for prompt in context.prompts[:SAMPLES]]


def save_dataset(sequences: list[list[int]], folder: Path) -> None:
    """A dataset as `speculators prepare-data` makes it."""
    rows = {"input_ids": sequences, "loss_mask": [[1] * len(ids) for ids in sequences]}
    lengths = [len(ids) for ids in sequences]
    Dataset.from_dict({**rows, "seq_len": lengths}).with_format("torch").save_to_disk(str(folder))


def test_generate_offline_data_gets_the_extractors_own_states(
    context: RoundContext, extractor: Extractor, sequences: list[list[int]], tmp_path: Path
) -> None:
    model, target = str(context.target.path), context.target
    save_dataset(sequences, tmp_path / "dataset")
    with Front(extractor, model, target.shape.vocab_size, tmp_path / "front", concurrency=4) as front:
        command = [
            str(Path(sys.executable).with_name("speculators")), "generate-offline-data",
            "--endpoint", f"{front.address}/v1", "--model", model, "--preprocessed-data", str(tmp_path / "dataset"),
            "--output", str(tmp_path / "states"), "--concurrency", "4", "--validate-outputs", "--fail-on-error",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert front.served == SAMPLES
        assert list(front.folder.iterdir()) == [], "the client has taken every file"
        refused = httpx.post(f"{front.address}/v1/completions", json={"prompt": [1] * 5000}, timeout=60)
        assert refused.status_code == 400, refused.text

    for number, ids in enumerate(sequences):
        ours, theirs = extractor.extract(ids), load_file(tmp_path / "states" / f"hs_{number}.safetensors")
        assert theirs["token_ids"].tolist() == ids
        assert theirs["hidden_states"].shape == (len(ids), len(context.config.extract.taps) + 1, 576)
        # Requests that shared a batch differ from a lone one by rounding only.
        error = (
            theirs["hidden_states"].float() - ours.hidden_states.float()
        ).norm() / ours.hidden_states.float().norm()
        assert error < 5e-3
        assert theirs["hidden_states"].dtype == torch.bfloat16


def test_training_generates_the_states_it_lacks(
    context: RoundContext, extractor: Extractor, sequences: list[list[int]], tmp_path: Path
) -> None:
    """``speculators train --on-missing generate``, through our entry because the trainer alone has no CPU mode."""
    model, events = str(context.target.path), tmp_path / "events.jsonl"
    save_dataset(sequences, tmp_path / "dataset")
    with Front(extractor, model, context.target.shape.vocab_size, tmp_path / "front", concurrency=4) as front:
        command = [
            sys.executable, "-m", "infra.drafter.trainer_entry", "--events", str(events), "--device", "cpu",
            "--speculator-type", "eagle3", "--verifier-name-or-path", model, "--data-path", str(tmp_path / "dataset"),
            "--save-path", str(tmp_path / "draft"), "--log-dir", str(tmp_path / "logs"),
            "--hidden-states-backend", "file", "--on-missing", "generate", "--vllm-endpoint", f"{front.address}/v1",
            "--train-data-ratio", "0.8", "--target-layer-ids", *map(str, context.config.extract.taps),
            "--draft-arch", "llama", "--num-layers", "1", "--full-attention-indices", "0", "--no-norm-before-residual",
            "--mask-token-id", "0", "--total-seq-len", "256", "--ttt-steps", "2", "--epochs", "1", *CPU_ARGUMENTS,
        ]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCH_COMPILE_DISABLE": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert front.served >= SAMPLES
        assert list(front.folder.iterdir()) == [], "what was read is deleted"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    losses = [line["train"]["loss"] for line in lines if "train" in line]
    assert losses
    assert all(0 < loss < 100 for loss in losses)
    assert not (tmp_path / "dataset" / "hidden_states").exists(), "no states are stored"
