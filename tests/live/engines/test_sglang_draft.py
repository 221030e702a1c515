"""The installed SGLang's own loader reads a draft in its layout, on the CPU: every tensor into its place."""

import json
import os
import socket
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file
from standin import sglang_reader
from standin.speculators_draft import NUMBERS, draft_config, write_draft

from infra.engines.sglang.draft import write_sglang

STAND_INS = Path(__file__).resolve().parents[3] / "infra" / "engines" / "plugins" / "sgl_kernel_cpu"


def test_the_real_loader_fills_every_parameter_with_what_the_tests_reader_says(
    sglang_environment: Path, models: Path, tmp_path: Path
) -> None:
    python = sglang_environment
    folder = write_sglang(write_draft(tmp_path / "draft", draft_config()), tmp_path / "sglang", NUMBERS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / "read"
    target = models / "SmolLM2-135M-Instruct"
    script = Path(__file__).with_name("sglang_load.py")
    done = subprocess.run(
        [str(python), str(script), str(target), str(folder), str(port), str(out)],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STAND_INS)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]

    expected, said = sglang_reader.read(folder), json.loads(out.with_suffix(".json").read_text())
    found = load_file(out.with_suffix(".safetensors"))
    assert said["architectures"] == ["LlamaForCausalLMEagle3"]
    assert said["ids"] == list(NUMBERS.ids)
    assert expected.hot_token_id is not None
    assert said["hot_token_id"] == expected.hot_token_id.tolist()
    assert {name for name, tensor in found.items() if bool(tensor.isnan().any())} == {"model.embed_tokens.weight"}
    assert found.keys() == expected.parameters.keys()
    for name in found.keys() - {"model.embed_tokens.weight"}:
        own, padding = found[name].float().split_with_sizes(_with_padding(found[name], expected.parameters[name]))
        assert torch.equal(own, expected.parameters[name]), name
        assert not bool(padding.any()), "SGLang pads the head to a multiple of 64 tokens"


def _with_padding(found: torch.Tensor, expected: torch.Tensor) -> list[int]:
    return [len(expected), len(found) - len(expected)]
