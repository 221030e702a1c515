"""Hidden states out of a real SGLang on CPU, against transformers; and faults planted in its launch and its plugin."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from standin import sglang_releases
from standin.real_engines import CHUNK
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.config.round import EngineConfig, RungConfig
from infra.config.settings import Settings
from infra.engines.client.client import Client
from infra.engines.client.extraction import ExtractionFault, Extractor
from infra.engines.registry import Launch, LaunchRequest, Server, engine_version, find_engine
from infra.engines.sglang import capture as sglang_capture
from infra.engines.sglang.capture import PLUGIN
from infra.engines.sglang.layer_ids import NUMBERING
from infra.round.serving import Serving
from infra.targets.final_norm import read_final_norm
from infra.targets.target import Target

pytestmark = pytest.mark.timeout(900)

TEXT = "The quick brown fox jumps over the lazy dog while seven wizards mix a jug of quartz, and nobody asks why. " * 9
TAPS = (2, 15, 27)
LENGTHS = (200, 1, 31, 32, 33, 64, 97, 129)
TRUNCATED = 50
PLANTED = f"""
from eagle3_sglang import gather

add = gather.Gather.add

def short(self, start, length, rows):
    if start == {CHUNK} and length == {TRUNCATED - CHUNK}:
        rows = rows[: length - 1]
    add(self, start, length, rows)

def register():
    gather.Gather.add = short
"""
"""A second plugin, which loses the last row of the second chunk of requests of ``TRUNCATED`` tokens."""

ROUNDING = 0.005
"""More than float32 states lose in bfloat16, and less than a quarter of the way to a neighbouring layer."""

Change = Callable[[Launch], Launch]


@pytest.fixture(scope="module")
def tokens(target: Target) -> list[int]:
    return [int(token) for token in AutoTokenizer.from_pretrained(target.path)(TEXT)["input_ids"]]


class Changed:
    """SGLang, launched in another way than the project does."""

    def __init__(self, change: Change) -> None:
        self._engine, self._change = find_engine("sglang"), change

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def launch(self, *args: object) -> Launch:
        return self._change(self._engine.launch(*args))  # type: ignore[arg-type]


@contextmanager
def serving(settings: Settings, target: Target, staging: Path, change: Change) -> Iterator[Extractor]:
    """The extraction side of a server with small chunks, launched in another way; it is gone afterwards."""
    staging.mkdir()
    rung = RungConfig(name="small-chunks", flags=("--chunked-prefill-size", str(CHUNK)))
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=512, ready_seconds=900, ladder=(rung,))
    request = LaunchRequest(target, config, "extract", taps=TAPS, staging=staging, concurrency=8)
    engine = Changed(change)
    with Server(engine, request, settings) as server:  # type: ignore[arg-type]
        server.wait_ready()
        shape = target.shape
        ids = NUMBERING.ids(server.version, shape.family, TAPS, shape.layers)
        with Client(server.base_url, find_engine("sglang").dialect, timeout=300) as client:
            yield Extractor(client, staging, TAPS, shape.hidden_size, final_norm=read_final_norm(target), layer_ids=ids)


def test_states_equal_the_references_under_chunks_and_concurrency(
    sglang: Serving, target: Target, tokens: list[int]
) -> None:
    sequences = [tokens[start : start + length] for start, length in enumerate(LENGTHS)]
    extractor = sglang.extractor(300)
    extractor.prove()
    with ThreadPoolExecutor(len(LENGTHS)) as threads:
        found = list(threads.map(extractor.extract, sequences))
    assert list(sglang.staging.iterdir()) == []
    reference, norm = Reference(target), read_final_norm(target)
    for sequence, states in zip(sequences, found, strict=True):
        assert states.token_ids.tolist() == sequence
        layers = reference.layers(sequence)
        for slot, tap in enumerate(sglang.context.config.extract.taps):
            found_tap = states.hidden_states[:, slot]
            assert errors(found_tap, layers[tap]).max() < ROUNDING, (tap, len(sequence))
            if len(sequence) > 1:  # the first token's stream hardly changes from layer to layer
                neighbour = min(errors(found_tap, layers[near]).median() for near in (tap - 1, tap + 1))
                assert neighbour > 4 * ROUNDING, (tap, len(sequence))
        assert errors(norm(states.hidden_states[:, -1]), layers[-1]).max() < ROUNDING, len(sequence)
        assert states.next_token == reference.next_token(sequence)


def test_another_checkouts_plugin_a_prefix_from_the_cache_and_a_lost_row_are_refused_and_the_rest_goes_on(
    sglang_environment: Path, settings: Settings, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server has the three faults: it starts with last week's plugin, a prefix cache and a plugin that loses rows.

    Where the plugin is to be believed, this checkout is taken back to last week.
    """
    plant(tmp_path / "planted")
    stale = tmp_path / PLUGIN.name
    shutil.copytree(PLUGIN, stale)
    with (stale / PLUGIN.name / "gather.py").open("a") as module:
        module.write("# as it was last week\n")

    def change(launch: Launch) -> Launch:
        command = tuple(part for part in launch.command if part != "--disable-radix-cache")
        path = launch.env["PYTHONPATH"].replace(str(PLUGIN), str(stale))
        return replace(launch, command=command, env={**launch.env, "PYTHONPATH": f"{path}:{tmp_path / 'planted'}"})

    with serving(settings, target, tmp_path / "staging", change) as extractor:
        with pytest.raises(ExtractionFault, match="not the one of this checkout"):
            extractor.prove()
        monkeypatch.setattr(sglang_capture, "PLUGIN", stale)
        monkeypatch.setattr(sglang_capture, "plugin_digest", sglang_capture.plugin_digest.__wrapped__)
        with pytest.raises(ExtractionFault, match=rf"{TRUNCATED - 1} rows for {TRUNCATED} tokens"):
            extractor.extract(range(1000, 1000 + TRUNCATED))
        assert extractor.extract(range(2000, 2040)).token_ids.tolist() == list(range(2000, 2040))
        with pytest.raises(ExtractionFault, match="taken from the prefix cache"):
            extractor.extract(range(2000, 2060))
        with pytest.raises(ExtractionFault, match="taken from the prefix cache"):
            extractor.prove()
        assert extractor.extract(range(3000, 3040)).token_ids.tolist() == list(range(3000, 3040))


def test_the_installed_release_has_what_was_recorded_of_it(sglang_environment: Path, settings: Settings) -> None:
    """What the table says was read from a wheel; here it is read from what runs."""
    [packages] = sglang_environment.parent.parent.glob("lib/python3*/site-packages")
    version, read = sglang_releases.reader(packages)
    assert version == engine_version("sglang", "cpu", settings)
    assert sglang_releases.facts(read) == sglang_releases.recorded()[version]


def plant(folder: Path) -> None:
    """A distribution with a plugin that SGLang loads after ours."""
    metadata = folder / "zz_planted-1.dist-info"
    metadata.mkdir(parents=True)
    (folder / "zz_planted.py").write_text(PLANTED)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: zz-planted\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nzz_planted = zz_planted:register\n")


class Reference:
    """transformers in float32: entry k enters layer k; the last one comes after the final norm."""

    def __init__(self, target: Target) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)

    def layers(self, token_ids: Sequence[int]) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [layer[0] for layer in self._model(torch.tensor([list(token_ids)]), output_hidden_states=True)[2]]

    def next_token(self, token_ids: Sequence[int]) -> int:
        with torch.inference_mode():
            return int(self._model(torch.tensor([list(token_ids)])).logits[0, -1].argmax())


def errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative error of each token."""
    return (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
