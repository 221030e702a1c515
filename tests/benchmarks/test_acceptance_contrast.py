"""Does the measure measure? The smoke draft served as it is, with its taps permuted, and with its taps shifted by one.

Reads a finished smoke round from this machine's store (`make round` first); prints a table, compares within one run.
EAGLE3_BENCHMARK_ROUND names another round.
"""

import os
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from rich.table import Table
from standin.perturbed import perturbed

from infra.config.load import build_round, load_round, round_file
from infra.config.settings import Settings
from infra.engines.client.bench import run, summary
from infra.engines.client.client import Sampling
from infra.errors import StoreError
from infra.round.context import RoundContext
from infra.round.draft_layouts import draft_folder, served_draft
from infra.round.serving import Serving
from infra.round.stored import training as stored_training
from infra.steps.evaluate import prompt_sets
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
    sets = prompt_sets(context)
    draft = draft_folder(context)
    drafts = {
        "as trained": draft,
        "taps permuted": perturbed(draft, tmp_path / "permuted", "layers_permuted"),
        "taps shifted by one": perturbed(draft, tmp_path / "shifted", "taps_shifted"),
    }
    lengths: dict[tuple[str, str], float] = {}
    table = Table("draft", *(item.name for item in sets), title="acceptance length, 3 drafts")
    for name, folder in drafts.items():
        with Serving(context, "bench", draft=served_draft(context, folder)) as serving:
            client = serving.ready(600)
            for item in sets:
                concurrency = max(item.concurrencies)
                sampling = Sampling(item.max_tokens)
                measured = summary([run(client, item.prompts, sampling=sampling, concurrency=concurrency)])
                assert measured.counters is not None
                lengths[name, item.name] = 1 + measured.counters.accepted / measured.counters.drafts
        table.add_row(name, *(f"{lengths[name, item.name]:.3f}" for item in sets))
    Console(width=100).print(table)
    for item in sets:
        best = lengths["as trained", item.name] - 1
        assert lengths["taps permuted", item.name] - 1 < 0.5 * best
        assert lengths["taps shifted by one", item.name] - 1 < 0.9 * best
