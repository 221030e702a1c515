"""Publishing: a folder for each engine, which layouts are left out and why, and what counts as published."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from standin import sglang_reader
from standin.sample_report import build
from standin.speculators_draft import draft_config, write_draft

from infra.config.load import load_round, round_file
from infra.config.round import TargetShape
from infra.config.settings import Settings
from infra.errors import StoreError
from infra.report.card import cards
from infra.results import Report
from infra.round.context import Round
from infra.round.keys import StepKeys
from infra.round.layouts import layouts, served_draft
from infra.round.publication import publication_done, published_prefix, publishing_rounds
from infra.steps.publish import publish as publish_cards
from infra.targets.target import Target

LLAMA = TargetShape(layers=30, hidden_size=16, vocab_size=40, weight_bytes=1, family="llama")
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23", "speculators": "0.9.0"}


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "smoke-sglang", **changes: Any) -> Round:
    """A round on a machine of its own whose draft is in the store."""
    monkeypatch.setenv("EAGLE3_STATE_DIR", str(folder))
    (folder / "target").mkdir(exist_ok=True)
    (folder / "target" / "config.json").write_text('{"model_type": "llama"}')
    round_ = Round(load_round(round_file(name)), Settings())
    round_.__dict__ |= {
        "target": Target(name="SmolLM2-135M-Instruct", path=folder / "target", shape=LLAMA, revision="r"),
        "versions": VERSIONS,
        "keys": StepKeys("a" * 12, "b" * 12, "c" * 12, f"{len(name):012d}", "e" * 12, "f" * 12, "0" * 12),
    }
    made = write_draft(folder / f"made-{name}", draft_config(**changes))
    for path in made.iterdir():
        round_.store.put(f"{round_.prefix('draft')}/{path.name}", path)
    return round_


def finished(round_: Round) -> Report:
    files = ("config.json", "model.safetensors")
    digests = {name: hashlib.sha256(round_.store.get(f"{round_.prefix('draft')}/{name}")).hexdigest() for name in files}
    url = f"{round_.settings.store}/{published_prefix(round_)}"
    training = build().training.model_copy(update={"files": digests})
    return build(training=training, layouts=layouts(round_, url), published=f"{url}/vllm")


def publish(round_: Round, report: Report) -> str:
    return publish_cards(round_, report, cards(report, round_.config.target.source))


def folder(round_: Round) -> Path:
    path = round_.store.local_path(published_prefix(round_))
    assert path is not None
    return path


def test_one_training_is_published_for_both_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = trained(tmp_path, monkeypatch)
    assert not publication_done(round_)
    assert publish(round_, finished(round_)).endswith("/vllm")

    assert publication_done(round_)
    names = {str(path.relative_to(folder(round_))) for path in folder(round_).rglob("*") if path.is_file()}
    both = {
        f"{engine}/{name}"
        for engine in ("vllm", "sglang")
        for name in ("config.json", "model.safetensors", "README.md")
    }
    assert names == {*both, "sglang/eagle3.json", "publication.json"}
    assert sglang_reader.read(folder(round_) / "sglang").ids == [1, 14, 26]
    assert json.loads((folder(round_) / "vllm/config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [
        2,
        15,
        27,
    ]


def test_a_layout_that_cannot_be_is_no_error_and_an_earlier_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = trained(tmp_path, monkeypatch, norm_before_residual=True)
    round_.store.put(f"{published_prefix(round_)}/sglang/config.json", b"{}")
    report = finished(round_)
    assert "SGLang 0.5.23 cannot express norm_before_residual" in report.layouts[1].why_not
    publish(round_, report)

    assert publication_done(round_)
    assert [path.name for path in folder(round_).iterdir() if path.is_dir()] == ["vllm"]
    assert "SGLang's layout is not published: SGLang 0.5.23" in (folder(round_) / "vllm/README.md").read_text()


def test_a_publication_with_a_file_missing_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = trained(tmp_path, monkeypatch)
    publish(round_, finished(round_))
    (folder(round_) / "sglang" / "model.safetensors").unlink()
    assert not publication_done(round_)


def test_a_damaged_draft_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = trained(tmp_path, monkeypatch)
    report = finished(round_)
    round_.store.put(f"{round_.prefix('draft')}/model.safetensors", b"other")
    with pytest.raises(StoreError, match="model.safetensors is damaged"):
        publish(round_, report)
    assert not publication_done(round_)


def test_each_engine_is_handed_the_draft_in_its_own_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = trained(tmp_path, monkeypatch)
    source = tmp_path / "made-smoke-sglang"
    assert served_draft(round_, source) == source
    round_.config = round_.config.model_copy(update={"serve_with": "sglang"})
    assert sglang_reader.read(served_draft(round_, source)).architectures == ["LlamaForCausalLMEagle3"]


def test_the_other_rounds_that_published_for_the_target_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = trained(tmp_path, monkeypatch), trained(tmp_path, monkeypatch, "smoke")
    publish(first, finished(first))
    assert publishing_rounds(first) == []
    assert [rounds.round_name for rounds in publishing_rounds(second)] == ["smoke-sglang"]
