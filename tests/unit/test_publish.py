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
from infra.round.context import RoundContext
from infra.round.draft_layouts import layouts, served_draft
from infra.round.keys import StepKeys
from infra.round.publication import publication_done, published_prefix, publishing_rounds
from infra.steps.publish import publish as publish_cards
from infra.targets.target import Target

LLAMA = TargetShape(layers=30, hidden_size=16, vocab_size=40, weight_bytes=1, family="llama")
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23", "speculators": "0.9.0"}


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "smoke-sglang", **changes: Any) -> RoundContext:
    """A round on a machine of its own whose draft is in the store."""
    monkeypatch.setenv("EAGLE3_STATE_DIR", str(folder))
    (folder / "target").mkdir(exist_ok=True)
    (folder / "target" / "config.json").write_text('{"model_type": "llama"}')
    context = RoundContext(load_round(round_file(name)), Settings())
    context.__dict__ |= {
        "target": Target(name="SmolLM2-135M-Instruct", path=folder / "target", shape=LLAMA, revision="r"),
        "versions": VERSIONS,
        "keys": StepKeys("a" * 12, "b" * 12, "c" * 12, f"{len(name):012d}", "e" * 12, "f" * 12, "0" * 12),
    }
    made = write_draft(folder / f"made-{name}", draft_config(**changes))
    for path in made.iterdir():
        context.store.put(f"{context.prefix('draft')}/{path.name}", path)
    return context


def finished(context: RoundContext) -> Report:
    files = ("config.json", "model.safetensors")
    digests = {
        name: hashlib.sha256(context.store.get(f"{context.prefix('draft')}/{name}")).hexdigest() for name in files
    }
    url = f"{context.settings.store}/{published_prefix(context)}"
    training = build().training.model_copy(update={"files": digests})
    return build(training=training, layouts=layouts(context, url), published=f"{url}/vllm")


def publish(context: RoundContext, report: Report) -> str:
    return publish_cards(context, report, cards(report, context.config.target.source))


def folder(context: RoundContext) -> Path:
    path = context.store.local_path(published_prefix(context))
    assert path is not None
    return path


def test_one_training_is_published_for_both_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = trained(tmp_path, monkeypatch)
    assert not publication_done(context)
    assert publish(context, finished(context)).endswith("/vllm")

    assert publication_done(context)
    names = {str(path.relative_to(folder(context))) for path in folder(context).rglob("*") if path.is_file()}
    both = {
        f"{engine}/{name}"
        for engine in ("vllm", "sglang")
        for name in ("config.json", "model.safetensors", "README.md")
    }
    assert names == {*both, "sglang/eagle3.json", "publication.json"}
    assert sglang_reader.read(folder(context) / "sglang").ids == [1, 14, 26]
    assert json.loads((folder(context) / "vllm/config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [
        2,
        15,
        27,
    ]


def test_a_layout_that_cannot_be_is_no_error_and_an_earlier_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = trained(tmp_path, monkeypatch, norm_before_residual=True)
    context.store.put(f"{published_prefix(context)}/sglang/config.json", b"{}")
    report = finished(context)
    assert "SGLang 0.5.23 cannot express norm_before_residual" in report.layouts[1].why_not
    publish(context, report)

    assert publication_done(context)
    assert [path.name for path in folder(context).iterdir() if path.is_dir()] == ["vllm"]
    assert "SGLang's layout is not published: SGLang 0.5.23" in (folder(context) / "vllm/README.md").read_text()


def test_a_publication_with_a_file_missing_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = trained(tmp_path, monkeypatch)
    publish(context, finished(context))
    (folder(context) / "sglang" / "model.safetensors").unlink()
    assert not publication_done(context)


def test_a_damaged_draft_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = trained(tmp_path, monkeypatch)
    report = finished(context)
    context.store.put(f"{context.prefix('draft')}/model.safetensors", b"other")
    with pytest.raises(StoreError, match="model.safetensors is damaged"):
        publish(context, report)
    assert not publication_done(context)


def test_each_engine_is_handed_the_draft_in_its_own_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = trained(tmp_path, monkeypatch)
    source = tmp_path / "made-smoke-sglang"
    assert served_draft(context, source) == source
    context.config = context.config.model_copy(update={"serve_with": "sglang"})
    assert sglang_reader.read(served_draft(context, source)).architectures == ["LlamaForCausalLMEagle3"]


def test_the_other_rounds_that_published_for_the_target_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = trained(tmp_path, monkeypatch), trained(tmp_path, monkeypatch, "smoke")
    publish(first, finished(first))
    assert publishing_rounds(first) == []
    assert [rounds.round_name for rounds in publishing_rounds(second)] == ["smoke-sglang"]
