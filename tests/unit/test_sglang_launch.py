"""SGLang's command lines, environment, version and what is read from its log."""

import json
from pathlib import Path

import pytest
from standin.launches import flag, request

from infra.config.round import EngineConfig, RungConfig
from infra.config.settings import Settings
from infra.engines.launch import Launch, Profile
from infra.engines.sglang.engine import ENGINE
from infra.errors import EngineError

CPU, CUDA = "0.5.23", "0.5.17"


def installed(folder: Path, version: str) -> None:
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "bin" / "python").touch(mode=0o755)
    packages = folder / "lib" / "python3.11" / "site-packages"
    for name in (f"sglang-{version}.dist-info", "sglang_kernel-0.4.5.dist-info"):
        (packages / name).mkdir(parents=True, exist_ok=True)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, version in (("SGLANG_CPU", CPU), ("SGLANG_CUDA", CUDA)):
        installed(tmp_path / name, version)
        monkeypatch.setenv(f"EAGLE3_ENV_{name}", str(tmp_path / name))
    return Settings(state_dir=tmp_path / "state", cache_dir=tmp_path / "cache")


def launch(
    settings: Settings,
    profile: Profile,
    device: str = "cpu",
    family: str = "llama",
    trust: bool = False,
    tensor_parallel: int = 1,
    **more: object,
) -> Launch:
    config = EngineConfig(device=device, tensor_parallel=tensor_parallel, max_model_len=512)  # type: ignore[arg-type]
    rung = RungConfig(name="r", flags=("--dtype", "float16"), env={"NCCL_PROTO": "LL", "HF_HUB_OFFLINE": "0"})
    return ENGINE.launch(request(profile, config, family, trust, **more), rung, 1234, settings)


def test_the_rungs_own_flags_and_environment_win(settings: Settings) -> None:
    made = launch(settings, "generate", concurrency=17)
    assert made.command[-2:] == ("--dtype", "float16")
    assert (made.env["NCCL_PROTO"], made.env["HF_HUB_OFFLINE"]) == ("LL", "0")
    assert flag(made.command, "--host") == "127.0.0.1"
    assert flag(made.command, "--max-running-requests") == "17"
    assert flag(made.command, "--served-model-name") == made.served_name
    assert made.served_name != launch(settings, "generate").served_name
    assert int(flag(made.command, "--context-length")) >= 512 + 7
    assert "--trust-remote-code" not in made.command
    assert "--trust-remote-code" in launch(settings, "generate", trust=True).command


def test_what_stands_in_for_kernels_stays_on_the_processor(settings: Settings) -> None:
    cpu, cuda = launch(settings, "generate"), launch(settings, "generate", device="cuda", tensor_parallel=8)
    assert (Path(cpu.env["PYTHONPATH"]) / "sgl_kernel" / "__init__.py").is_file()
    assert flag(cpu.command, "--device") == "cpu"
    assert "PYTHONPATH" not in cuda.env
    assert "--device" not in cuda.command
    assert "--disable-cuda-graph" not in cuda.command
    assert flag(cuda.command, "--tp-size") == "8"


@pytest.mark.parametrize(("device", "folders"), [("cpu", 2), ("cuda", 1)])
def test_extraction_loads_the_plugin_and_tells_it_the_layers(
    settings: Settings, tmp_path: Path, device: str, folders: int
) -> None:
    made = launch(settings, "extract", device=device, taps=(2, 15, 27), staging=tmp_path)
    path = made.env["PYTHONPATH"].split(":")
    assert len(path) == folders
    assert list(Path(path[0]).glob("*.dist-info/entry_points.txt"))
    assert made.env["EAGLE3_CAPTURE_STAGING"] == str(tmp_path)
    assert json.loads(made.env["EAGLE3_CAPTURE_IDS"]) == [1, 14, 26]
    assert made.command[made.command.index("--sampling-defaults") + 1] == "openai"
    assert made.command.count("--disable-radix-cache") == made.command.count("--disable-cuda-graph") == 1
    generating = launch(settings, "generate", device=device)
    assert not [name for name in generating.env if name.startswith("EAGLE3_")]


def test_states_are_whole_on_several_gpus(settings: Settings, tmp_path: Path) -> None:
    made = launch(settings, "extract", device="cuda", tensor_parallel=2, taps=(2, 15, 27), staging=tmp_path)
    assert "--enforce-disable-flashinfer-allreduce-fusion" in made.command


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"profile": "extract", "taps": (2, 15, 27)}, "staging"),
        ({"profile": "extract", "taps": (2, 15), "staging": Path("/s"), "family": "mamba"}, "'mamba'"),
        ({"profile": "bench", "draft": Path("/d")}, "draft on the CPU.*vllm"),
        ({"profile": "generate", "tensor_parallel": 2}, "several CPUs"),
        ({"profile": "generate", "family": "deepseek_v3"}, "deepseek_v3.*on a CPU"),
    ],
)
def test_what_sglang_cannot_do_is_refused(settings: Settings, request_: dict[str, object], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        launch(settings, **request_)  # type: ignore[arg-type]


def test_a_draft_is_served_as_a_chain(settings: Settings) -> None:
    made = launch(settings, "bench", device="cuda", draft=Path("/drafts/d"), drafts=5)
    assert flag(made.command, "--speculative-algorithm") == "EAGLE3"
    assert flag(made.command, "--speculative-draft-model-path") == "/drafts/d"
    assert flag(made.command, "--speculative-num-steps") == "5"
    assert flag(made.command, "--speculative-eagle-topk") == "1"
    assert flag(made.command, "--speculative-num-draft-tokens") == "6"
    plain = launch(settings, "bench", device="cuda")
    assert not [word for word in plain.command if word.startswith("--speculative")]


def test_the_version_is_read_from_the_environment(settings: Settings) -> None:
    assert ENGINE.version("cpu", settings) == CPU
    assert ENGINE.version("cuda", settings) == CUDA


@pytest.mark.parametrize(("version", "known"), [
    ("0.5.13", False), ("0.5.14", True), ("0.5.23.post1", True), ("0.5.24", False), ("0.6.0", False), ("main", False),
])  # fmt: skip
def test_versions_that_were_not_read_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, known: bool
) -> None:
    installed(tmp_path / "env", version)
    monkeypatch.setenv("EAGLE3_ENV_SGLANG_CPU", str(tmp_path / "env"))
    settings = Settings(state_dir=tmp_path / "state")
    if known:
        assert ENGINE.version("cpu", settings) == version
    else:
        with pytest.raises(EngineError, match=rf"SGLang {version} .*0\.5\.14 to 0\.5\.23"):
            ENGINE.version("cpu", settings)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("launch_server.py: error: unrecognized arguments: --no-such-flag", "flags --no-such-flag"),
        ("[Errno 98] error while attempting to bind on address: address already in use", "port was taken"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "not enough memory"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "not enough memory"),
        (
            "AttributeError: the layer has no weight\n"
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: 1).",
            "the layer has no weight",
        ),
    ],
)
def test_known_faults_are_recognised_in_a_log(log: str, words: str) -> None:
    assert words in (ENGINE.cause(log) or "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[2026-11-29 21:09:05] server_args={'model_path': '/m'}", "read its arguments"),
        ("[2026-11-29 21:11:09] Load weight begin. avail mem=16.41 GB", "loading weights"),
        ("Multi-thread loading shards: 100% Completed | 1/1 [00:01<00:00,  1.51s/it]", "loading weights: 1 of 1 files"),
        ("[2026-11-29 21:11:11] Load weight end. elapsed=1.92 s, type=LlamaForCausalLM", "weights loaded"),
        ("[2026-11-29 21:11:22] KV Cache is allocated. dtype: torch.float32, #tokens: 4160", "KV cache made"),
        ("[2026-11-29 21:11:24] The server is fired up and ready to roll!", "answering"),
        ("[2026-11-29 21:10:59] Ignore import error when loading sglang.srt.models.grok: no", None),
    ],
)
def test_lines_tell_phases(line: str, words: str | None) -> None:
    assert ENGINE.phase(line) == words
