"""The stand-in as an engine of this project: put in vLLM's place, it says everywhere that it is none."""

import os
import secrets
import sys
from pathlib import Path

import httpx

from infra.config.round import RungConfig
from infra.config.settings import Settings
from infra.engines.launch import Launch, LaunchRequest
from infra.engines.vllm.engine import Vllm

SERVER = Path(__file__).with_name("server.py")
VERSION = "0.32.0"


class StandInEngine(Vllm):
    """Launches ``server.py``; its version is ``STANDIN_VERSION``, so that a test can change it. All else is vLLM's."""

    name = "standin"

    def version(self, device: str, settings: Settings) -> str:
        """One whose layers are known, so that it is let through where the engine in whose place it is would be."""
        return os.environ.get("STANDIN_VERSION", VERSION)

    def launch(self, request: LaunchRequest, rung: RungConfig, port: int, settings: Settings) -> Launch:
        """The server's command line."""
        name = f"standin-{secrets.token_hex(4)}"
        command = [sys.executable, str(SERVER), "--target", str(request.target.path), "--port", str(port)]
        command += ["--name", name, "--version", self.version(request.config.device, settings)]
        if request.staging is not None:
            command += ["--taps", ",".join(map(str, request.taps)), "--staging", str(request.staging)]
        if request.draft is not None:
            command += ["--drafts", str(request.drafts)]
        return Launch(tuple(command), {"OMP_NUM_THREADS": "1"}, name)

    def phase(self, line: str) -> str | None:
        """It starts at once."""
        return None

    def cause(self, log: str) -> str | None:
        """The last line that it wrote."""
        return log.splitlines()[-1] if log else None

    def served_version(self, base_url: str) -> str:
        """What the server says."""
        return str(httpx.get(f"{base_url}/version", trust_env=False).json()["version"])
