"""Every config of ``tests/cases`` with both engines: the plan refuses it with a reason, or it is trained.

The real trainer opens each; the layers of these targets are nowhere, so no engine runs. ``pytest -s`` prints the table.
"""

import json
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from standin.tiny_chat import make_target
from standin.training import random_trainee

from deployments.cli.app import main
from infra.config.load import load_round
from infra.config.settings import Settings
from infra.drafter.checkpoint import publishable
from infra.drafter.opening import planned_draft
from infra.drafter.trainer import train
from infra.engines.draft import read_config
from infra.engines.limits import wrapper_fault
from infra.engines.registry import find_engine
from infra.engines.sglang.draft import write_sglang
from infra.engines.sglang.layer_ids import NUMBERING
from infra.machine.gpus.readings import GpuReport
from infra.round.checks import refusals
from infra.round.preflight import faults
from infra.targets.target import open_target

pytestmark = pytest.mark.timeout(900)

CASES = Path(__file__).resolve().parents[1] / "cases"
NO_GPU = GpuReport(False, "no NVIDIA driver", "", ())
LATENT = "latent attention"
UNKNOWN = "target is not known"
KINDS: dict[str, tuple[str, str]] = {
    # what the plan says with vLLM, and with SGLang, as a pattern; "" where the round is accepted
    "llama31-rope": ("", ""),
    "qwen2": ("", ""),
    "qwen3-yarn": ("", ""),
    "text-config-null": ("", ""),
    "gpt-oss": ("", ""),
    "mistral3": ("", "inside the mistral3 target"),
    "glm4-moe": (UNKNOWN, ""),
    "minimax-m2": ("vllm 0.33.0 numbers the captured layers", ""),
    "deepseek-v3": (LATENT, ""),
    "kimi-k2": (LATENT, ""),
    "kimi-k25": (LATENT, ""),
    "config-with-code": (LATENT, ""),
    "gpt2-names": ("config.json|final norm", "config.json|final norm"),
    "internvl-llm-config": ("internvl_chat|config.json", "internvl_chat|config.json"),
    "qwen2.5-vl-flat": (UNKNOWN, UNKNOWN),
}
LATENT_ATTENTION = {"deepseek-v3", "kimi-k2", "kimi-k25", "config-with-code"}
TRAINED = {
    "llama31-rope": "0.5.14 to 0.5.23",
    "qwen3-yarn": "0.5.14 to 0.5.23",
    "text-config-null": "0.5.14 to 0.5.23",
    "mistral3": "",
    "gpt-oss": "0.5.17 to 0.5.23",
    "kimi-k25": "0.5.16 to 0.5.23",
    "config-with-code": "0.5.16 to 0.5.23",
}
"""One of each accepted kind, with the SGLang versions that its layout holds for; "" where it has none."""


@pytest.fixture(scope="module")
def openings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that all cases share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def settings(tmp_path: Path, openings: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in ("VLLM_CUDA", "SGLANG_CUDA"):
        monkeypatch.delenv(f"EAGLE3_ENV_{name}", raising=False)
    monkeypatch.setenv("EAGLE3_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("EAGLE3_CACHE_DIR", str(openings))
    return Settings()


def put(settings: Settings, name: str) -> None:
    """The case as a target in the models folder: its config, a tokenizer, and the tensors outside its layers."""
    folder = settings.models_dir / name
    folder.mkdir(parents=True)
    make_target(folder)
    alone = CASES / "configs" / f"{name}.config.json"
    files = {alone: "config.json"} if alone.is_file() else {path: path.name for path in (CASES / name).iterdir()}
    for path, file in files.items():
        shutil.copy(path, folder / file)
    torch.manual_seed(0)
    tensors = {"embed_tokens": torch.randn(256, 64), "norm": 0.5 + torch.rand(64)}
    weights = {f"model.{part}.weight": tensor for part, tensor in tensors.items()}
    weights["lm_head.weight"] = torch.randn(256, 64)
    save_file({key: tensor.to(torch.bfloat16) for key, tensor in weights.items()}, folder / "model.safetensors")


def taps_for(name: str) -> tuple[int, ...]:
    """SGLang reads a list that begins with 1 otherwise where the target has latent attention."""
    return (2, 3) if name in LATENT_ATTENTION else (1, 2, 3)


def a_round(folder: Path, name: str, engine: str) -> Path:
    path = folder / f"{engine}.yaml"
    fields: dict[str, Any] = {
        "name": f"{name}-{engine}".lower(),
        "target": {"name": name, "trust_remote_code": name == "config-with-code"},
        "prompts": {"count": 4, "max_prompt_tokens": 200},
        "generate": {"max_tokens": 16},
        "prepare": {"max_tokens": 256},
        "extract": {"engine": engine, "taps": list(taps_for(name))},
        "evaluate": {"prompts": {"source": "builtin:heldout", "count": 4, "max_prompt_tokens": 200}, "max_tokens": 16},
        "engines": {engine: {"device": "cuda", "max_model_len": 512}},
        "serve_with": engine,
        "budget": {"free_bytes": 0},
    }
    path.write_text(yaml.safe_dump(fields))
    return path


def planned(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit status, reasons) of ``eagle3 plan PATH --json``."""
    monkeypatch.setattr(sys, "argv", ["eagle3", "plan", str(path), "--json"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    try:
        status = main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    output = capsys.readouterr()
    if not output.out.strip():
        return status, output.err
    facts = json.loads(output.out)
    return status, facts["refused"] if "refused" in facts else facts["error"]["what"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_target_is_accepted_or_refused_in_the_plan(
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    engine: str,
) -> None:
    put(settings, name)
    path = a_round(tmp_path, name, engine)
    status, said = planned(path, monkeypatch, capsys)
    before = " ".join(faults(load_round(path), settings, NO_GPU))
    with capsys.disabled():
        print(f"\n| {name} | {engine} | {'refused: ' + said if status else 'accepted'} |")
    expected = KINDS[name][engine == "sglang"]
    assert status == bool(expected), said
    assert re.search(expected, said)
    assert re.search(expected, before)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nonsense", "1"), "unrecognized arguments: --nonsense"),
        (("--save-path=elsewhere",), "it would change --save-path, which the pipeline sets itself"),
        (("--norm-before-residual",), "norm_before_residual True"),
        (("--loss-fn", "guess"), "Unknown loss function 'guess'"),
        (("--muon-lr", "0.02"), ""),
    ],
)
def test_the_trainer_itself_judges_further_arguments(
    settings: Settings, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    put(settings, "qwen2")
    config = load_round(a_round(tmp_path, "qwen2", "vllm"), {"train.extra_args": list(arguments)})
    found = refusals(config, settings)
    assert any(said in text for text in found) if said else found == []


@pytest.mark.parametrize("name", TRAINED)
def test_an_accepted_kind_is_trained_and_published_in_both_layouts(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    put(settings, name)
    target = open_target(load_round(a_round(tmp_path, name, "vllm")).target, settings.models_dir)
    trainee = random_trainee(target, settings.store, taps_for(name))
    job = trainee.job(tmp_path / "work", epochs=1, max_steps=2)
    result = train(job, trainee.samples, run_dir=settings.run_dir)
    assert result.steps == 2

    trained = read_config(result.checkpoint)
    elsewhere = trainee.job(tmp_path / "opening", epochs=1, max_steps=2)
    foreseen = planned_draft(elsewhere, settings.run_dir, settings.cache_dir / "openings")
    assert foreseen["transformer_layer_config"] == trained["transformer_layer_config"]

    plain = publishable(result.checkpoint, tmp_path / "vllm", "org/target")
    assert read_config(plain)["eagle_aux_hidden_state_layer_ids"] == list(taps_for(name))
    assert str(tmp_path) not in (plain / "config.json").read_text()
    if not TRAINED[name]:
        assert wrapper_fault(find_engine("sglang"), target) is not None
        return
    out = write_sglang(plain, tmp_path / "sglang", NUMBERING.numbers(taps_for(name), target.shape, None))
    said = json.loads((out / "eagle3.json").read_text())
    held = said["layer_ids_hold_for"]
    with capsys.disabled():
        print(f"\n| {name} | trained 2 steps | SGLang's layout holds for {held['since']} to {held['until']} |")
    assert f"{held['since']} to {held['until']}" == TRAINED[name]
    rule = NUMBERING.find_rule(held["since"], target.shape.family)
    assert rule.taps(said["layer_ids"], 4) == taps_for(name)
