"""A finished round's scratch: what it leaves there goes, and what other settings of it go on with stays."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from infra.disk.scratch import clean_scratch
from infra.results import TRAINING
from infra.round.context import RoundContext
from infra.store.answers import DONE
from infra.store.objects import ObjectStore


def round_on(folder: Path) -> RoundContext:
    """What cleaning asks of a round."""
    scratch = folder / "scratch" / "one"
    scratch.mkdir(parents=True)
    config = SimpleNamespace(name="one")
    return cast(
        RoundContext, SimpleNamespace(store=ObjectStore(f"file://{folder / 'store'}"), config=config, scratch=scratch)
    )


def finish(store: ObjectStore, key: str) -> None:
    """Answers and a draft of this key are in the store."""
    store.put(f"rounds/one/answers/{key}/{DONE}", b"{}")
    store.put(f"rounds/one/draft/{key}/model.safetensors", b"w")
    store.put(f"rounds/one/draft/{key}/{TRAINING}", json.dumps({"files": {"model.safetensors": ""}}).encode())


def names(context: RoundContext) -> list[str]:
    return sorted(item.name for item in context.scratch.iterdir())


def leave(context: RoundContext, *found: str) -> None:
    for name in found:
        path = context.scratch / name
        if path.suffix:
            path.write_text("{}")
        else:
            path.mkdir()


def test_what_a_finished_round_leaves_goes_and_an_interrupted_trial_stays(tmp_path: Path) -> None:
    context = round_on(tmp_path)
    finish(context.store, "mine")
    leave(context, "train-mine", "answers-mine.jsonl", "staging", "staging-vllm", "draft-mine", "sglang-0.5.23", "walk")
    leave(context, "reference-x1", "front", "front-dataset", "train-trial", "answers-trial.jsonl", "notes-of-a-person")
    clean_scratch(context.store, context.scratch)
    assert names(context) == ["answers-trial.jsonl", "front-dataset", "notes-of-a-person", "train-trial"]


def test_the_folder_goes_when_nothing_is_in_it(tmp_path: Path) -> None:
    context = round_on(tmp_path)
    finish(context.store, "mine")
    leave(context, "train-mine", "walk")
    clean_scratch(context.store, context.scratch)
    assert not context.scratch.exists()
