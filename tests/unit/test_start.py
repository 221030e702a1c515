"""The draft that a training starts from: found in a folder, a hub or the store; refused where it does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from standin.speculators_draft import HIDDEN, PROPOSED, VOCABULARY, draft_config, draft_weights, write_draft

from infra.config.load import build_round, load_round, round_file
from infra.config.round import RoundConfig, TargetShape
from infra.config.settings import Settings
from infra.config.training import TrainConfig
from infra.drafter.job import draft_shape
from infra.drafter.start import kept_tokens, read_start, start_faults, write_start
from infra.errors import ConfigError, MissingDraft
from infra.round.checks import refusals
from infra.round.start import fetch_start, find_start, to_be_fetched
from infra.store.objects import ObjectStore
from infra.store.publications import PUBLICATION, Publication
from infra.store.rounds import RoundStore
from infra.targets.target import Target

SHAPE = TargetShape(layers=30, hidden_size=HIDDEN, vocab_size=VOCABULARY, weight_bytes=1, family="llama")
DRAFT = draft_shape(TrainConfig(layers=1), (2, 15, 27), PROPOSED, SHAPE)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path / "state", cache_dir=tmp_path / "cache")


def faults(folder: Path, planned: dict[str, Any] | None = None, target: Target | None = None) -> list[str]:
    return list(start_faults(read_start("earlier", folder), DRAFT, planned or draft_config(), target))


def target_with(embedding: torch.Tensor, folder: Path) -> Target:
    folder.mkdir()
    save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    return Target(name="Small", path=folder, shape=SHAPE, revision="r")


def test_a_draft_like_the_rounds_own_fits(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", draft_config())
    embedding = draft_weights(draft_config())["embed_tokens.weight"]
    assert faults(draft, target=target_with(embedding.to(torch.float32), tmp_path / "target")) == []
    older = draft_config()
    layer = older["transformer_layer_config"]
    layer["rope_theta"] = layer.pop("rope_parameters")["rope_theta"]
    assert faults(write_draft(tmp_path / "older", older)) == [], "written by an earlier transformers"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 14, 27]}, "taps is (2, 14, 27) there and (2, 15, 27) here"),
        ({"draft_vocab_size": 24}, f"draft_vocab_size is 24 there and {PROPOSED} here"),
        ({"norm_before_residual": True}, "norm_before_residual is True there"),
        ({"norm_output": True}, "norm_output is True there"),
        ({"layers": 2}, "layers is 2 there and 1 here"),
        ({"speculators_model_type": "dflash"}, "is none that speculators wrote"),
    ],
)
def test_another_draft_is_refused_by_what_differs(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    config = draft_config(layers=changes.pop("layers", 1)) | changes
    [text] = faults(write_draft(tmp_path / "draft", config, draft_weights(draft_config())))
    assert said in text
    assert "the draft to start from (earlier)" in text
    assert "another one" not in text or text.endswith("or leave train.from out to start anew")


def test_another_shape_or_vocabulary_of_the_target_is_refused(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", draft_config())
    wider = draft_config()
    wider["transformer_layer_config"] |= {"hidden_size": 32, "vocab_size": 80}
    [text] = faults(draft, planned=wider)
    assert f"hidden_size is {HIDDEN} there and 32 here" in text
    assert f"vocab_size is {VOCABULARY} there and 80 here" in text
    cut = write_draft(tmp_path / "cut", draft_config(), draft_weights(draft_config()) | {"d2t": torch.arange(5)})
    [text] = faults(cut)
    assert "has d2t [5]" in text


def test_a_draft_of_another_target_is_refused(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", draft_config())
    [text] = faults(draft, target=target_with(torch.randn(VOCABULARY, HIDDEN), tmp_path / "target"))
    assert "was trained for another target: its copy of the embedding is not that of Small" in text


def test_the_trainer_gets_float32_this_machines_target_and_the_same_vocabulary(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", draft_config())
    start = read_start("earlier", draft)
    out = write_start(start, tmp_path / "verifier", tmp_path / "out")
    text = (out / "config.json").read_text()
    assert str(tmp_path / "verifier") in text
    assert '"dtype": "float32"' in text
    kept = kept_tokens(read_start("x", out))
    assert kept is not None
    assert kept.tolist() == [2 * token for token in range(PROPOSED)], "d2t holds offsets"
    (draft / "config.json").write_text(text)
    with pytest.raises(MissingDraft, match="has changed since"):
        write_start(start, tmp_path / "verifier", tmp_path / "out")


def test_moved_it_is_the_same_draft_and_other_weights_are_another(tmp_path: Path) -> None:
    one = read_start("one", write_draft(tmp_path / "one", draft_config()))
    assert read_start("two", write_draft(tmp_path / "two", draft_config())).digest == one.digest
    assert read_start(str(one.folder), one.folder).words == f"one ({one.digest})", "no path of this machine"
    assert read_start("round:first", one.folder).words == f"round:first ({one.digest})"
    weights = draft_weights(draft_config())
    weights["fc.weight"] += 1
    assert read_start("three", write_draft(tmp_path / "three", draft_config(), weights)).digest != one.digest


def publish(store: ObjectStore, name: str, key: str, folder: Path) -> None:
    for path in folder.iterdir():
        store.put(f"published/Small/{name}-{key}/vllm/{path.name}", path)
    said = Publication(key=key, round=name, draft_key=key, files={})
    store.put(f"published/Small/{name}-{key}/{PUBLICATION}", said.model_dump_json().encode())
    RoundStore(store, name).point("published", key, {})


def test_what_a_round_published_last_is_found(settings: Settings, tmp_path: Path) -> None:
    store = ObjectStore(settings.store)
    with pytest.raises(MissingDraft, match="round first has published nothing"):
        find_start("round:first", settings, store)
    draft = write_draft(tmp_path / "draft", draft_config())
    publish(store, "first", "aaa", write_draft(tmp_path / "old", draft_config(norm_output=True)))
    publish(store, "second", "bbb", tmp_path / "old")
    publish(store, "first", "ccc", draft)
    found = find_start("round:first", settings, store)
    assert found is not None
    assert found.digest == read_start("x", draft).digest


def smoke(**changes: Any) -> RoundConfig:
    raw = load_round(round_file("smoke")).model_dump(mode="json")
    return build_round(raw, {"target.name": "not-here", **changes})


def test_plan_and_preflight_refuse_what_does_not_fit(settings: Settings, tmp_path: Path) -> None:
    [text] = refusals(smoke(**{"train.from": str(tmp_path / "nowhere")}), settings)
    assert "cannot be read" in text
    draft = write_draft(tmp_path / "draft", draft_config())
    [text] = refusals(smoke(**{"train.from": str(draft)}), settings)
    assert f"draft_vocab_size is {PROPOSED} there and {smoke().prepare.draft_vocab_size} here" in text
    assert refusals(smoke(), settings) == []
    with pytest.raises(ConfigError, match="cannot start from what it publishes itself"):
        smoke(**{"train.from": "round:smoke"})


def test_a_hubs_draft_is_fetched_when_the_round_starts(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "hf://org/draft@main"
    assert to_be_fetched(said, settings)
    assert refusals(smoke(**{"train.from": said}), settings) == [], "it is judged when it is here"
    [text] = refusals(smoke(**{"train.from": "hf://org/draft"}), settings)
    assert "hf://org/draft@revision" in text
    with pytest.raises(MissingDraft, match="is not here yet"):
        find_start(said, settings, ObjectStore(settings.store))

    def comes(repository: str, revision: str, names: tuple[str, ...], folder: Path) -> None:
        assert (repository, revision) == ("org/draft", "main")
        write_draft(folder, draft_config())

    monkeypatch.setattr("infra.round.start.fetch_files", comes)
    fetch_start(said, settings)
    assert not to_be_fetched(said, settings)
    [text] = refusals(smoke(**{"train.from": said}), settings)
    assert "another one than this round makes" in text
