"""A hub's repository is judged by the list of its files and by its small ones; weights come only to a whole target."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save
from standin.hub import Hub, hub
from standin.tiny_chat import make_target

from infra.config.round import TargetConfig
from infra.errors import MissingTarget
from infra.targets.fetch import fetch_target
from infra.targets.files import whole_fault
from infra.targets.target import open_target

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 320, "num_attention_heads": 2}
PARTS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
WEIGHTS = save({"a": np.zeros(4, np.float32)})
Files = dict[str, bytes]


@pytest.fixture
def whole(tmp_path: Path) -> Files:
    """A repository as they are: weights in parts with an index, the same weights in another layout, pictures."""
    make_target(tmp_path / "made")
    files = {item.name: item.read_bytes() for item in (tmp_path / "made").iterdir()}
    index = {"metadata": {}, "weight_map": {"a": PARTS[0], "b": PARTS[1]}}
    files |= dict.fromkeys(PARTS, WEIGHTS)
    files |= {"config.json": json.dumps(CONFIG).encode(), "model.safetensors.index.json": json.dumps(index).encode()}
    return files | {"consolidated.safetensors": b"x", "README.md": b"x", "original/params.json": b"{}", "a.png": b"x"}


def fetched(tmp_path: Path, code: bool = False) -> Path:
    config = TargetConfig(name="Tiny", source="hf://org/model@main", fetch=True, trust_remote_code=code)
    folder = fetch_target(config, tmp_path / "models", tmp_path / "cache")
    open_target(config, tmp_path / "models")
    return folder


def weights_sent(taken: Hub) -> list[str]:
    return [name for name in taken.sent if name.endswith((".safetensors", ".bin", ".gguf"))]


def test_a_whole_repository_comes_whole_and_once(whole: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(whole, monkeypatch) as taken:
        folder = fetched(tmp_path)
        expected = {name for name in whole if "/" not in name} - {"consolidated.safetensors", "README.md", "a.png"}
        assert {item.name for item in folder.iterdir()} == expected
        assert sorted(weights_sent(taken)) == PARTS
        assert len(taken.sent) == len(set(taken.sent)) == len(expected)


def lacking(*names: str, **more: bytes) -> tuple[tuple[str, ...], Files]:
    return names, {name.replace("__", "."): data for name, data in more.items()}


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lacking("config.json"), r"it has no config\.json"),
        (lacking("config.json", params__json=b"{}"), r"Mistral's own layout \(params\.json\)"),
        (lacking("tokenizer.json", "tokenizer_config.json", tekken__json=b"{}"), r"its only tokenizer is tekken\.json"),
        (lacking("tokenizer.json"), "it has no tokenizer, none of"),
        (lacking("tokenizer.json", vocab__json=b"{}"), r"merges\.txt.*is missing"),
        (lacking(*PARTS, INDEX, pytorch_model__bin=b"x"), r"pickled only \(pytorch_model\.bin\)"),
        (lacking(*PARTS, INDEX, "consolidated.safetensors", model__gguf=b"x"), "no weights in .*what is there is GGUF"),
        (lacking(*PARTS, INDEX), r"only weights are in Mistral's own layout \(consolidated"),
        (lacking(*PARTS, INDEX, adapter_config__json=b"{}", adapter_model__safetensors=b"x"), "an adapter for another"),
        (lacking(PARTS[1]), "1 of its 2 weight files are missing, such as model-00002-of-00002"),
        (lacking(PARTS[0], PARTS[1], part__safetensors=WEIGHTS), "its index names 2 weight files that it does not"),
        (lacking("config.json", **{"config__json": b'{"model_type": "t5"}'}), "no 'num_hidden_layers'"),
        (lacking("config.json", **{"config__json": b"{"}), "is not JSON"),
        (lacking("tokenizer.json", **{"tokenizer__json": b"{}"}), "the tokenizer of target .* cannot be loaded"),
        (
            lacking("tokenizer.json", "tokenizer_config.json", tiktoken__model=b"YQ== 0\n",
                    tokenizer_config__json=b'{"auto_map": {"AutoTokenizer": ["own.Own", null]}}'),
            r"comes as Python code \(own\.Own\).*trust_remote_code",
        ),
    ],
)  # fmt: skip
def test_what_can_never_be_a_target_costs_no_weights(
    change: tuple[tuple[str, ...], Files], words: str, whole: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, more = change
    files = {name: data for name, data in whole.items() if name not in without} | more
    with hub(files, monkeypatch) as taken:
        for _ in range(2):
            with pytest.raises(MissingTarget, match=words):
                fetched(tmp_path)
        assert weights_sent(taken) == []
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".Tiny.lock"]


def test_a_template_that_is_missing_is_said_while_it_is_fetched(
    whole: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It can be written beside the weights, so it is no reason to leave them."""
    caplog.set_level(logging.INFO)
    config = TargetConfig(name="Tiny", source="hf://org/model@main", fetch=True)
    with hub({name: data for name, data in whole.items() if name != "chat_template.jinja"}, monkeypatch):
        fetch_target(config, tmp_path / "models", tmp_path / "cache")
    assert any("has no chat template" in line for line in caplog.messages)


def test_a_closed_repository_is_said(whole: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(whole, monkeypatch) as taken:
        taken.closed = True
        with pytest.raises(MissingTarget, match="org/model@main is closed.*accept its terms.*HF_TOKEN"):
            fetched(tmp_path)


def test_a_repository_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub({}, monkeypatch):
        config = TargetConfig(name="Tiny", source="hf://org/other@main", fetch=True)
        with pytest.raises(MissingTarget, match="org/other@main could not be downloaded"):
            fetch_target(config, tmp_path / "models", tmp_path / "cache")


def test_a_name_that_no_hub_takes_and_a_hub_that_is_switched_off_are_said(
    whole: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(whole, monkeypatch):
        config = TargetConfig(name="Tiny", source="hf://org/-model-@main", fetch=True)
        with pytest.raises(MissingTarget, match="is no name of a repository"):
            fetch_target(config, tmp_path / "models", tmp_path / "cache")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(MissingTarget, match="HF_HUB_OFFLINE is set"):
            fetched(tmp_path)


def test_weights_that_came_before_the_line_broke_are_kept(
    whole: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(whole, monkeypatch) as taken:
        taken.broken = {PARTS[1]}
        with pytest.raises(MissingTarget, match="fetch again"):
            fetched(tmp_path)
        [kept] = (tmp_path / "models" / ".partial" / "Tiny").iterdir()
        (kept / "half.incomplete").write_bytes(b"half")
        taken.broken = set()
        folder = fetched(tmp_path)
        assert taken.sent.count(PARTS[0]) == 1, "what was whole is not fetched again"
    assert not list(folder.rglob("*.incomplete")), "what was begun is not left to fill the disk"
    assert sorted(item.name for item in folder.parent.iterdir()) == [".Tiny.lock", "Tiny"]


def test_what_came_of_another_source_is_not_mixed_in(
    whole: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(whole, monkeypatch) as taken:
        taken.broken = {PARTS[1]}
        other = TargetConfig(name="Tiny", source="hf://org/model@other", fetch=True)
        with pytest.raises(MissingTarget, match="fetch again"):
            fetch_target(other, tmp_path / "models", tmp_path / "cache")
        taken.broken = set()
        fetched(tmp_path)
        assert taken.sent.count(PARTS[0]) == 2


def test_weights_that_do_not_fit_are_refused_before_their_first_byte(
    whole: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(whole, monkeypatch) as taken:
        monkeypatch.setattr("infra.targets.hub.shutil.disk_usage", lambda folder: SimpleNamespace(free=1))
        with pytest.raises(MissingTarget, match=r"org/model needs 160 B more and 1 B are free"):
            fetched(tmp_path)
        assert weights_sent(taken) == []


def test_an_error_without_words_is_told_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    with pytest.raises(MissingTarget, match=r"could not be downloaded: LocalEntryNotFoundError\."):
        fetched(tmp_path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("config.json", "tokenizer.json", "model.safetensors"), ""),
        (("config.json", "tiktoken.model", "tokenizer_config.json", "model.safetensors"), ""),
        (("config.json", "vocab.json", "merges.txt", "model.safetensors"), ""),
        (("config.json", "tokenizer.model", "model.safetensors", "pytorch_model.bin", "m.gguf", "tekken.json"), ""),
        (("config.json", "qwen.tiktoken", "adapter_config.json", "model.safetensors"), ""),
        (("config.json", "tokenizer_config.json", "model.safetensors"), "no tokenizer"),
        (("config.json", "tokenizer.json", "flax_model.msgpack", "tf_model.h5"), "Flax and TensorFlow"),
        (("model_index.json", "README.md"), "no config.json"),
        ((), "no config.json"),
    ],
)
def test_names_tell_whether_a_folder_can_be_a_target(names: tuple[str, ...], words: str) -> None:
    what, fix = whole_fault(names)
    assert bool(what) == bool(fix) == bool(words)
    assert words in what
