"""Does the measure measure? The smoke draft served as it is, with its taps permuted, and with its taps shifted by one.

Reads a finished smoke round from this machine's store (`make round` first) whose states were kept. It prints a table of
predicted, served, the difference step by step, and the serving gate's verdict. EAGLE3_BENCHMARK_ROUND names another
round: so it runs on a GPU with either engine.
"""

import os
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from rich.table import Table
from standin.contrast import COLUMNS, contrast
from standin.perturbed import perturbed

from infra.config.load import build_round, load_round, round_file
from infra.config.settings import Settings
from infra.errors import StoreError
from infra.round.context import RoundContext
from infra.round.draft_layouts import draft_folder
from infra.round.states import extracted_samples
from infra.round.stored import training as stored_training
from infra.steps.evaluate import heldout_samples
from infra.store.objects import ObjectStore
from infra.store.rounds import RoundStore


def finished_round() -> RoundContext:
    """The round to serve, with the configuration that it last ran with."""
    settings = Settings()
    name = os.environ.get("EAGLE3_BENCHMARK_ROUND", "smoke")
    rounds = RoundStore(ObjectStore(settings.store), name)
    try:
        stored = yaml.safe_load(rounds.store.get(f"{rounds.prefix}/round.yaml"))
        context = RoundContext(build_round(stored["round"]), settings)
    except StoreError:
        context = RoundContext(load_round(round_file(name)), settings)
    if stored_training(context) is None:
        pytest.skip(f"round {name} has no trained draft in {settings.store}; run it first")
    return context


def test_faults_in_the_taps_show_in_acceptance(tmp_path: Path) -> None:
    context = finished_round()
    draft = draft_folder(context)
    drafts = {
        "as trained": draft,
        "taps permuted": perturbed(draft, tmp_path / "permuted", "layers_permuted"),
        "taps shifted by one": perturbed(draft, tmp_path / "shifted", "taps_shifted"),
    }
    samples = extracted_samples(context)
    count = context.config.evaluate.heldout_count
    groups = {
        "held-out": heldout_samples(samples, count),
        # A draft is stronger on what it was trained on.
        "trained on": [sample for sample in samples if sample.split == "train"][:count],
    }
    table = Table(*COLUMNS, title=f"{context.config.serve_with}, {context.config.evaluate.drafts} drafts")
    stopped: dict[tuple[str, str], str] = {}
    for found in contrast(context, draft, drafts, groups, tmp_path):
        table.add_row(*found.row)
        stopped[found.draft, found.prompts] = found.stopped
    Console(width=160).print(table)
    for name in groups:
        assert not stopped["as trained", name]
        assert stopped["taps permuted", name]
        assert stopped["taps shifted by one", name]
