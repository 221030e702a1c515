"""What SGLang's releases have of what the capture plugin reaches for, and of what the layer table says of them."""

from pathlib import Path
from typing import Any

import pytest
from standin import sglang_releases

from infra.config.version import dotted, read_version
from infra.engines.layer_ids import Rule
from infra.engines.sglang.engine import SINCE, UNTIL
from infra.engines.sglang.layer_ids import RULES

RELEASES: dict[str, dict[str, Any]] = sglang_releases.recorded()
MODEL_FILES = {"deepseek_v3": "deepseek_v2", "kimi_k2": "deepseek_v2"}


def test_every_release_that_may_be_launched_is_recorded() -> None:
    assert SINCE[:2] == UNTIL[:2], "or the releases between them have other numbers"
    assert list(RELEASES) == [dotted((*SINCE[:2], patch)) for patch in range(SINCE[2], UNTIL[2] + 1)]


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_has_what_the_plugin_reaches_for(version: str) -> None:
    release = RELEASES[version]
    assert release["TpModelWorker.__init__"] == ["is_draft_worker"]
    assert release["TpModelWorker.model_runner"] is True
    assert release["TpModelWorker.forward_batch_generation"][:2] == ["self", "batch"]
    names = ["self", "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states"]
    assert release["LogitsProcessor.forward"][: len(names)] == names
    assert release["LogitsProcessorOutput"] == ["customized_info"]
    assert release["ScheduleBatch"] == ["reqs", "forward_mode", "prefix_lens", "extend_lens"]
    assert release["Req.__init__"] == ["rid", "origin_input_ids"]
    assert release["ForwardMode.is_extend_without_speculative"] is True
    assert release["HookRegistry.register"] == ["cls", "target", "hook", "hook_type"]
    assert release["HookType"] == ["AFTER", "AROUND"]
    assert release["get_parallel"] == list(sglang_releases.PARALLEL)
    assert release["the scheduler loads plugins"] is True


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.families[0]}-{rule.since[2]}")
def test_a_row_spans_releases_whose_setter_is_the_same(rule: Rule) -> None:
    for family in rule.families:
        model = MODEL_FILES.get(family, family)
        setters = {
            version: release[sglang_releases.SETTER][model]
            for version, release in RELEASES.items()
            if rule.since <= read_version(version) <= rule.until
        }
        assert len(setters) == rule.until[2] - rule.since[2] + 1
        assert len(set(setters.values())) == 1, setters


MODEL = """
class TinyForCausalLM:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.layers = {body}
"""


def test_a_setter_that_changes_changes_its_fingerprint_and_layout_does_not() -> None:
    first = sglang_releases.fingerprint(MODEL.format(body="[k + 1 for k in layer_ids]"))
    assert sglang_releases.fingerprint(MODEL.format(body="[k  +  1 for k in layer_ids]  # one up")) == first
    assert sglang_releases.fingerprint(MODEL.format(body="[k for k in layer_ids]")) != first
    assert sglang_releases.fingerprint("class TinyForCausalLM(Llama):\n    pass\n") == "inherited"


def test_a_release_without_a_target_cannot_be_recorded(tmp_path: Path) -> None:
    (tmp_path / "sglang-0.5.99.dist-info").mkdir()
    (tmp_path / "sglang/srt/managers").mkdir(parents=True)
    (tmp_path / "sglang/srt/managers/tp_worker.py").write_text("class OtherWorker:\n    pass\n")
    version, read = sglang_releases.reader(tmp_path)
    assert version == "0.5.99"
    with pytest.raises((StopIteration, FileNotFoundError)):
        sglang_releases.facts(read)
