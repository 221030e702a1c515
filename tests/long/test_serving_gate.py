"""The serving gate with the real vLLM: a draft whose layer ids are right passes, one whose ids are off by one stops.

The draft is trained here for some minutes. On what it was trained on it is strong, on held-out prompts it is weak.
"""

from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from standin.contrast import COLUMNS, contrast
from standin.perturbed import perturbed

from infra.config.load import load_round, round_file
from infra.config.settings import Settings
from infra.round.context import RoundContext
from infra.round.draft_layouts import draft_folder
from infra.round.serving import Serving
from infra.round.states import extracted_samples, make_live, shards_of
from infra.round.stored import point
from infra.steps.extract import Extraction
from infra.steps.generate import Asking, generate
from infra.steps.prepare import prepare
from infra.steps.train import train_draft

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
CHANGES = {
    "prompts.count": 100,
    "generate.max_tokens": 96,
    "prepare.heldout": 0.25,
    "prepare.draft_vocab_size": 4096,
    "train.epochs": 12,
    "evaluate.heldout_count": 30,
}


@pytest.fixture(scope="module")
def trained(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RoundContext:
    """A round up to its draft, made by its own steps."""
    settings = Settings(state_dir=tmp_path_factory.mktemp("state"), models_path=models)
    context = RoundContext(load_round(round_file("smoke"), CHANGES), settings)
    with Serving(context, "generate") as server:
        generate(context, Asking(server.ready(600), server.flights))
    point(context, "answers")
    prepare(context)
    point(context, "samples")
    with Serving(context, "extract") as server:
        todo = shards_of(context)
        with Extraction(context, server.extractor(600), server.flights, todo) as extraction:
            for plan in todo:
                extraction.shard(plan)
    make_live(context)
    train_draft(context, lambda progress: None)
    return context


def test_right_ids_pass_and_ids_off_by_one_stop(trained: RoundContext, tmp_path: Path) -> None:
    draft = draft_folder(trained)
    served = {"right": draft, "off by one": perturbed(draft, tmp_path / "shifted", "taps_shifted")}
    samples = extracted_samples(trained)
    groups = {
        "weak": [sample for sample in samples if sample.split == "heldout"],
        "strong": [sample for sample in samples if sample.split == "train"][:30],
    }
    found = list(contrast(trained, draft, served, groups, tmp_path))
    table = Table(*COLUMNS)
    for item in found:
        table.add_row(*item.row)
    Console(width=160).print(table)
    verdicts = {(item.draft, item.prompts): item.stopped for item in found}
    assert not any(item.paired.why_not for item in found)
    for prompts in groups:
        assert not verdicts["right", prompts]
        assert "on the same tokens" in verdicts["off by one", prompts]
