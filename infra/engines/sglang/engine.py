"""The engine SGLang: command lines, environment, version, and what its log says.

Flags and pages read in 0.5.14, 0.5.17 and 0.5.23; run with 0.5.23 on a CPU.
"""

import json
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Literal

import httpx

from infra.config.round import RungConfig
from infra.config.settings import Settings
from infra.config.version import dotted, read_version
from infra.engines.client.client import Client
from infra.engines.client.dialect import Dialect
from infra.engines.client.extraction import Extractor
from infra.engines.draft import DraftLayout
from infra.engines.engine import Engine
from infra.engines.launch import Launch, LaunchRequest, installed_version, staging_of
from infra.engines.limits import check_launch
from infra.engines.server.causes import explain, phase, words_of
from infra.engines.sglang.capture import LAYER_IDS, PLUGIN, STAGING
from infra.engines.sglang.dialect import SglangDialect
from infra.engines.sglang.draft import LAYOUT
from infra.engines.sglang.layer_ids import NUMBERING
from infra.engines.sglang.limits import LIMITS, WRAPPERS
from infra.environments.building import environment_python
from infra.errors import ConfigError, EngineError
from infra.machine.host import cpu_count
from infra.targets.final_norm import read_final_norm

SINCE, UNTIL = (0, 5, 14), (0, 5, 23)
"""First and last version that flags, pages and capture plugin were read for."""
STAND_INS = Path(__file__).parents[1] / "plugins" / "sgl_kernel_cpu"
SPARE_TOKENS = 8
"""SGLang takes prompts up to its context length less 7, and answers up to 2 less than what is left of it."""
CPU_MEMORY_SHARE = 0.3

PHASES = (
    phase(r"server_args=", "read its arguments"),
    phase(r"Init (?:torch distributed|parallel) begin", "starting the engine"),
    phase(r"Load weight begin", "loading weights"),
    phase(
        r"(?i:loading) (?:\S+ checkpoint )?shards:\s+\d+% Completed \| (?P<done>\d+)/(?P<total>\d+)",
        "loading weights: {done} of {total} files",
    ),
    phase(r"Load weight end", "weights loaded"),
    phase(r"KV Cache is allocated|Memory pool end", "KV cache made"),
    phase(
        r"Capturing (?:batches|num tokens).*?(?P<done>\d+)/(?P<total>\d+)", "capturing CUDA graphs: {done} of {total}"
    ),
    phase(r"Capture .*graph begin", "capturing CUDA graphs"),
    phase(r"Uvicorn running on", "opening the port"),
    phase(r"The server is fired up and ready to roll", "answering"),
)
ANOTHER_ABOVE = "scheduler died during initialization"
"""The launcher's error when a scheduler failed, which says why on its own lines above."""


class Sglang:
    """SGLang's HTTP server."""

    name = "sglang"
    title = "SGLang"
    library = "sglang"
    dialect: Dialect = SglangDialect()
    numbering = NUMBERING
    final_slot: Literal["pre_norm", "unit_rms"] = "unit_rms"
    wrappers = WRAPPERS
    limits = LIMITS
    layout: DraftLayout | None = LAYOUT

    def version(self, device: str, settings: Settings) -> str:
        """Version in the environment's metadata; see :class:`~infra.engines.launch.Engine`."""
        version = installed_version(_python(device, settings), ("sglang",), f"sglang-{device}")
        with suppress(ConfigError):
            if SINCE <= read_version(version) <= UNTIL:
                return version
        raise EngineError(
            f"SGLang {version} is not known to this project",
            expected=f"SGLang {dotted(SINCE)} to {dotted(UNTIL)}, which flags, pages and capture plugin were read for",
            fix=f"install one of them, e.g. by eagle3 engines install sglang-{device}",
        )

    def launch(self, request: LaunchRequest, rung: RungConfig, port: int, settings: Settings) -> Launch:
        """Command line and environment; the rung's own flags come last, so that they win."""
        config, target = request.config, request.target
        version = self.version(config.device, settings)
        check_launch(self, version, request)
        served_name = f"{target.name}-{secrets.token_hex(4)}"
        python = _python(config.device, settings)
        spare = SPARE_TOKENS + (request.drafts + 1 if request.draft is not None else 0)
        command = [
            str(python), "-m", "sglang.launch_server",
            "--host", "127.0.0.1", "--port", str(port),
            "--model-path", str(target.path), "--served-model-name", served_name,
            "--dtype", config.dtype,
            "--context-length", str(config.max_model_len + spare),
            "--max-running-requests", str(request.concurrency),
            "--random-seed", "0",
            "--grammar-backend", "none",
            "--disable-radix-cache",
            # The target's own sampling defaults stay out.
            "--sampling-defaults", "openai",
            "--incremental-streaming-output",
            "--log-level-http", "warning",
        ]  # fmt: skip
        if config.tensor_parallel > 1:
            command += ["--tp-size", str(config.tensor_parallel)]
        if target.trust_remote_code:
            command.append("--trust-remote-code")
        if config.device == "cpu":
            command += _cpu_flags(request)
        if request.profile == "extract":
            command += _extract_flags(request)
        if request.draft is not None:
            command += _draft_flags(request.draft, request.drafts)
        command += rung.flags
        env = _environment(request, version)
        if config.device == "cpu" and (others := _other_models(python, target.path)):
            env["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)
        env |= rung.env
        return Launch(command=tuple(command), env=env, served_name=served_name)

    def phase(self, line: str) -> str | None:
        """Progress in starting up, as SGLang's log tells it."""
        return words_of(line, PHASES)

    def cause(self, log: str) -> str | None:
        """The known fault that the log shows and its remedy, else its last error line."""
        return explain(log, hollow=ANOTHER_ABOVE)

    def served_version(self, base_url: str) -> str:
        """What ``GET /server_info`` says."""
        try:
            answer = httpx.get(f"{base_url}/server_info", timeout=30, trust_env=False)
            return str(answer.raise_for_status().json()["version"]).split("+")[0]
        except (httpx.HTTPError, KeyError, ValueError, TypeError) as error:
            raise EngineError(f"SGLang at {base_url} does not tell its version: {error}") from error

    def extractor(self, client: Client, request: LaunchRequest, version: str) -> Extractor:
        """See :class:`~infra.engines.engine.Engine`; our plugin captures, and shows here that it does."""
        shape = request.target.shape
        extractor = Extractor(
            client,
            staging_of(request),
            request.taps,
            shape.hidden_size,
            final_norm=read_final_norm(request.target),
            layer_ids=NUMBERING.ids(version, shape.family, request.taps, shape.layers),
        )
        extractor.prove()
        return extractor

    def serve_command(self, target: str, draft: str, drafts: int) -> str:
        """See :class:`~infra.engines.engine.Engine`."""
        return " ".join(["python -m sglang.launch_server --model-path", target, *_draft_flags(draft, drafts)])


def _cpu_flags(request: LaunchRequest) -> list[str]:
    """The KV cache is no larger than the requests can fill; an idle scheduler leaves the processor to others."""
    tokens = request.concurrency * (request.config.max_model_len + SPARE_TOKENS)
    return [
        "--device", "cpu",
        "--attention-backend", "torch_native",
        "--mem-fraction-static", str(CPU_MEMORY_SHARE),
        "--max-total-tokens", str(tokens),
        "--disable-cuda-graph",
        "--sleep-on-idle",
    ]  # fmt: skip


def _extract_flags(request: LaunchRequest) -> list[str]:
    """Every token of every request must pass through the model's Python code, where the plugin's hooks are."""
    flags = [] if request.config.device == "cpu" else ["--disable-cuda-graph"]
    if request.config.tensor_parallel > 1:
        # The fused all-reduce would leave partial sums in the states that some models capture.
        flags.append("--enforce-disable-flashinfer-allreduce-fusion")
    return flags


def _draft_flags(draft: Path | str, drafts: int) -> list[str]:
    """A chain of ``drafts`` tokens; the target also verifies the token before it."""
    return [
        "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", str(draft),
        "--speculative-num-steps", str(drafts),
        "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(drafts + 1),
    ]  # fmt: skip


def _environment(request: LaunchRequest, version: str) -> dict[str, str]:
    env = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # `python -m` would otherwise put the working folder first on the path.
        "PYTHONSAFEPATH": "1",
        # For the spare tokens of a round that uses the target's whole context; they are never filled.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    path: list[Path] = []
    if request.profile == "extract":
        shape = request.target.shape
        ids = NUMBERING.ids(version, shape.family, request.taps, shape.layers)
        env |= {STAGING: str(request.staging), LAYER_IDS: json.dumps(list(ids))}
        path.append(PLUGIN)
    if request.config.device == "cpu":
        # A waiting OpenMP thread must not spin on a core that SGLang's other processes need.
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(cpu_count()), "OMP_WAIT_POLICY": "PASSIVE"}
        # Penalties are compiled, and the compiler dies of the stand-in for triton.
        env["TORCH_COMPILE_DISABLE"] = "1"
        path.append(STAND_INS)
    if path:
        env["PYTHONPATH"] = ":".join(map(str, path))
    return env


def _other_models(python: Path, target: Path) -> list[str]:
    """SGLang's model modules that do not have the target's class; it would import all of them at each start.

    Empty when none is known to have it: SGLang then looks for itself.
    """
    config = target / "config.json"
    sources = python.parent.parent.glob("lib/python3*/site-packages/sglang/srt/models/*.py")
    modules = {path.stem: path.read_text() for path in sources} if config.is_file() else {}
    classes = "|".join(json.loads(config.read_text()).get("architectures") or ()) if modules else ""
    needed = {name for name, text in modules.items() if re.search(rf"^class ({classes})\b", text, re.MULTILINE)}
    return sorted(set(modules) - needed) if needed else []


def _python(device: str, settings: Settings) -> Path:
    return environment_python(f"sglang-{device}", settings.cache_dir)


ENGINE: Engine = Sglang()

__all__ = ["ENGINE", "Sglang"]
