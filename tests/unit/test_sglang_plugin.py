"""The capture plugin of SGLang without SGLang: chunks, faults, files, digest. What SGLang hands it is stood in for."""

import fcntl
import json
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infra.engines.sglang.capture import KEY, LAYER_IDS, PLUGIN, RID_PREFIX, STAGING, captured, plugin_digest
from infra.errors import ExtractionFault

HIDDEN = 4
PARALLEL = SimpleNamespace(pp_size=1, attn_tp_rank=0, attn_cp_rank=0)


class LogitsProcessor(torch.nn.Module):
    def forward(self, *_: object, **__: object) -> None:
        """Called by models with what the plugin notes."""


class Model(torch.nn.Module):
    """Captures, for id k, hidden states that are all k + 1, and ends with states that are all 99."""

    def __init__(self) -> None:
        super().__init__()
        self.logits_processor = LogitsProcessor()
        self.layers: list[int] = []
        self.packed, self.padding, self.lost = False, 0, 0

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.layers = [number + 1 for number in ids]

    def run(self, input_ids: list[int]) -> None:
        tokens = torch.tensor(input_ids + [0] * self.padding, dtype=torch.int32)
        rows = torch.arange(len(tokens), dtype=torch.float32)[:, None].expand(-1, HIDDEN)
        aux: Any = [rows + 1000 * layer for layer in self.layers][self.lost :]
        if self.packed:
            aux = torch.cat(aux, -1)
        self.logits_processor(None, rows + 99_000, object(), SimpleNamespace(input_ids=tokens), aux)


@dataclass
class Request:
    rid: str
    origin_input_ids: list[int]


@dataclass
class Batch:
    """A batch as SGLang schedules it: requests, each with the tokens it has and those that are computed now."""

    reqs: list[Request]
    prefix_lens: list[int]
    extend_lens: list[int]
    extend: bool = True
    forward_mode: Any = field(init=False)

    def __post_init__(self) -> None:
        self.forward_mode = SimpleNamespace(is_extend_without_speculative=lambda: self.extend)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The plugin's module ``capture``, imported into a process that looks like SGLang's."""
    logits, context = ModuleType("sglang.srt.layers.logits_processor"), ModuleType("sglang.srt.runtime_context")
    vars(logits)["LogitsProcessor"] = LogitsProcessor
    vars(context)["get_parallel"] = lambda: PARALLEL
    for name in ("sglang", "sglang.srt", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (logits, context):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(str(PLUGIN))
    yield import_module("eagle3_sglang.capture")
    for name in [name for name in sys.modules if name.startswith("eagle3_sglang")]:
        del sys.modules[name]


@dataclass
class Engine:
    """One rank that captures layers 1 and 2 (ids 0 and 1)."""

    capture: Any
    model: Model

    def step(self, batch: Batch, run: bool = True) -> list[dict[str, Any] | None]:
        """One forward; what the reply of each request would say."""
        self.capture.begin()
        if run:
            self.model.run([
                token
                for request, start, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
                for token in request.origin_input_ids[start : start + length]
            ])  # fmt: skip
        result = SimpleNamespace(logits_output=SimpleNamespace(customized_info=None))
        self.capture.end(batch, result)
        info = result.logits_output.customized_info
        return [text and json.loads(text) for text in info[KEY]] if info else [None] * len(batch.reqs)


@pytest.fixture
def engine(plugin: ModuleType, tmp_path: Path) -> Engine:
    model = Model()
    return Engine(plugin.Capture(model, [0, 1], tmp_path), model)


def request(number: int, length: int) -> Request:
    return Request(f"{RID_PREFIX}{number}", list(range(100 * number, 100 * number + length)))


def written(report: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """The file that a report names, once its lock is released."""
    assert report is not None, "no reply"
    path = Path(report["file"])
    with path.with_name(path.name + ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return load_file(path)


def test_a_request_in_one_forward_is_written_with_its_tokens_and_layers(engine: Engine) -> None:
    [report] = engine.step(Batch([request(1, 5)], [0], [5]))
    states = written(report)
    assert states["token_ids"].tolist() == [100, 101, 102, 103, 104]
    assert states["token_ids"].dtype == torch.int64
    assert states["hidden_states"].shape == (5, 3, HIDDEN)
    assert states["hidden_states"][3, :, 0].tolist() == [1003, 2003, 99_003]
    assert report is not None
    assert (report["layer_ids"], report["plugin"]) == ([0, 1], plugin_digest())


def test_chunks_of_requests_that_share_forwards_come_together_in_order(engine: Engine) -> None:
    first, second, third = request(1, 6), request(2, 3), request(3, 7)
    assert engine.step(Batch([first], [0], [4])) == [None]
    one, two, three = engine.step(Batch([first, second, third], [4, 0, 0], [2, 3, 1]))
    assert three is None
    *_, three = engine.step(Batch([third], [1], [6]))
    assert written(one)["token_ids"].tolist() == first.origin_input_ids
    assert written(one)["hidden_states"][:, 0, 0].tolist() == [1000, 1001, 1002, 1003, 1000, 1001]
    assert written(two)["hidden_states"][:, 0, 0].tolist() == [1002, 1003, 1004]
    assert written(three)["token_ids"].tolist() == third.origin_input_ids
    assert written(three)["hidden_states"][:, 2, 0].tolist() == [99_005, *range(99_000, 99_006)]


@pytest.mark.parametrize("packed", [False, True])
def test_padding_and_packed_layers_make_no_difference(engine: Engine, packed: bool) -> None:
    engine.model.padding, engine.model.packed = 3, packed
    [report] = engine.step(Batch([request(1, 2)], [0], [2]))
    assert written(report)["hidden_states"][:, :, 0].tolist() == [[1000, 2000, 99_000], [1001, 2001, 99_001]]


def test_other_peoples_requests_and_other_forwards_are_left_alone(engine: Engine, tmp_path: Path) -> None:
    stranger = Request("somebody", [1, 2])
    none, report = engine.step(Batch([stranger, request(1, 2)], [0, 0], [2, 2]))
    assert none is None
    assert written(report)["token_ids"].tolist() == [100, 101]
    assert engine.step(Batch([stranger], [0], [2])) == [None]
    assert engine.step(Batch([request(2, 2)], [0], [2], extend=False)) == [None]
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_a_prefix_taken_from_the_cache_is_a_fault(engine: Engine) -> None:
    [report] = engine.step(Batch([request(1, 5)], [2], [3]))
    with pytest.raises(ExtractionFault, match=r"tokens 0 to 2 .*prefix cache.*--disable-radix-cache"):
        captured({KEY: [json.dumps(report)]})


def test_a_chunk_that_is_missing_is_a_fault(engine: Engine) -> None:
    lost = request(1, 6)
    engine.step(Batch([lost], [0], [2]))
    [report] = engine.step(Batch([lost], [4], [2]))
    with pytest.raises(ExtractionFault, match="tokens 2 to 4"):
        captured({KEY: [json.dumps(report)]})


def test_a_forward_that_python_did_not_see_is_a_fault_even_after_one_it_saw(engine: Engine) -> None:
    engine.model.run([7, 7, 7])
    [report] = engine.step(Batch([request(1, 3)], [0], [3]), run=False)
    with pytest.raises(ExtractionFault, match="CUDA graph"):
        captured({KEY: [json.dumps(report)]})


def test_a_layer_that_the_target_did_not_capture_is_a_fault(engine: Engine) -> None:
    engine.model.lost = 1
    [report] = engine.step(Batch([request(1, 3)], [0], [3]))
    with pytest.raises(ExtractionFault, match=r"captured 1 of the 2 layers \[0, 1\]"):
        captured({KEY: [json.dumps(report)]})


def test_fewer_rows_than_tokens_are_a_fault(engine: Engine) -> None:
    batch = Batch([request(1, 3)], [0], [4])
    with pytest.raises(ExtractionFault, match="3 rows for 4 tokens|3, 3, 3"):
        captured({KEY: [json.dumps(engine.step(batch)[0])]})


def test_a_request_that_starts_again_is_gathered_anew(engine: Engine) -> None:
    again = request(1, 4)
    engine.step(Batch([again], [0], [2]))
    [report] = engine.step(Batch([again], [0], [4]))
    assert written(report)["token_ids"].tolist() == again.origin_input_ids


def test_a_file_that_cannot_be_written_leaves_a_released_lock_and_a_line_in_the_log(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{RID_PREFIX}1.safetensors.partial").mkdir()
    [report] = engine.step(Batch([request(1, 2)], [0], [2]))
    with pytest.raises(FileNotFoundError):
        written(report)
    assert "could not be written" in caplog.text


def test_a_file_that_could_be_written_in_part_leaves_nothing_of_it(engine: Engine, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))  # a write past 4 KiB fails as on a full disk
    try:
        [report] = engine.step(Batch([request(1, 1000)], [0], [1000]))
        with pytest.raises(FileNotFoundError):
            written(report)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == [f"{RID_PREFIX}1.safetensors.lock"]


def test_only_the_first_rank_of_a_group_writes(plugin: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(PARALLEL, "attn_tp_rank", 1)
    model = Model()
    other = Engine(plugin.Capture(model, [0, 1], tmp_path), model)
    assert model.layers == [1, 2]
    assert other.step(Batch([request(1, 2)], [0], [2])) == [None]
    assert list(tmp_path.iterdir()) == []


def test_pipeline_parallelism_and_models_that_cannot_capture_end_the_start(
    plugin: ModuleType, tmp_path: Path, monkeypatch: Any
) -> None:
    with pytest.raises(RuntimeError, match="Linear cannot capture"):
        plugin.Capture(torch.nn.Linear(1, 1), [0], tmp_path)
    monkeypatch.setattr(PARALLEL, "pp_size", 2)
    with pytest.raises(RuntimeError, match="pipeline"):
        plugin.Capture(Model(), [0], tmp_path)


def test_a_server_without_the_plugin_or_with_another_one_is_refused(engine: Engine) -> None:
    with pytest.raises(ExtractionFault, match="without a word of the capture plugin"):
        captured({"finish_reason": "length"})
    stale = {"plugin": "0" * 64, "layer_ids": [0, 1], "file": "/x.safetensors"}
    with pytest.raises(ExtractionFault, match="not the one of this checkout"):
        captured({KEY: [json.dumps(stale)]})
    current = {**stale, "plugin": plugin_digest()}
    assert captured({KEY: [json.dumps(current)]}) == ("/x.safetensors", (0, 1))


def test_the_names_on_both_sides_are_the_same(plugin: ModuleType) -> None:
    package = import_module("eagle3_sglang")
    assert (package.STAGING, package.LAYER_IDS) == (STAGING, LAYER_IDS)
    assert (plugin.KEY, plugin.PREFIX) == (KEY, RID_PREFIX)
    [metadata] = PLUGIN.glob("*.dist-info")
    assert "eagle3_capture = eagle3_sglang:register" in (metadata / "entry_points.txt").read_text()
    project = (PLUGIN / "pyproject.toml").read_text()
    assert f'version = "{metadata.name.removesuffix(".dist-info").split("-")[1]}"' in project
