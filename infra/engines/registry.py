"""The engines that a round can name, and starting one: the one entry point, whichever engine it is.

What an engine must say of itself is in :mod:`infra.engines.engine`.
"""

from importlib import import_module
from typing import cast

from infra.config.round import ENGINES, EngineName
from infra.config.settings import Settings
from infra.engines.engine import Engine
from infra.engines.launch import Launch, LaunchRequest, Profile
from infra.engines.server.server import Server
from infra.environments.descriptions import LOCKS, describe, pins
from infra.errors import EngineError, EnvironmentBuildError

__all__ = [
    "Engine",
    "Launch",
    "LaunchRequest",
    "Profile",
    "Server",
    "as_trained",
    "engine_version",
    "find_engine",
    "planned_version",
    "start",
]


def find_engine(name: str) -> Engine:
    """The engine called ``name``.

    Raises:
        EngineError: there is no such engine.
    """
    if name not in ENGINES:
        raise EngineError(f"there is no engine {name!r}", expected=f"one of {', '.join(ENGINES)}")
    return cast(Engine, import_module(f"infra.engines.{name}.engine").ENGINE)


def as_trained() -> list[EngineName]:
    """The engines that load a draft as the trainer writes it."""
    return [name for name in ENGINES if find_engine(name).layout is None]


def start(engine: str, request: LaunchRequest, settings: Settings) -> Server:
    """Launch the first rung of the engine's ladder and return at once; :meth:`Server.wait_ready` does the waiting.

    Raises:
        EngineError: there is no such engine, or it cannot do what is asked.
        EnvironmentBuildError: the engine's environment is not built.
    """
    return Server(find_engine(engine), request, settings)


def engine_version(engine: str, device: str, settings: Settings) -> str:
    """Version of the engine that would serve on ``device`` ("cpu" or "cuda"); reads metadata only.

    Raises:
        EngineError: there is no such engine, or its environment does not hold it.
        EnvironmentBuildError: its environment is not built.
    """
    return find_engine(engine).version(device, settings)


def planned_version(engine: str, device: str, settings: Settings) -> str:
    """As :func:`engine_version`; where the environment is not built, the version that its lock will bring.

    Raises:
        EngineError: there is no such engine, or its environment does not hold a version that this project knows.
    """
    try:
        return engine_version(engine, device, settings)
    except EnvironmentBuildError:
        return _locked_version(engine, device)


def _locked_version(engine: str, device: str) -> str:
    name = f"{engine}-{device}"
    try:
        description = describe(name)
    except EnvironmentBuildError as error:
        raise EngineError(
            f"{engine} has no environment for the device {device!r}",
            expected=f"an environment called {name} in infra/environments/locks/environments.toml",
            fix=f"set engines.{engine}.device to one that it has",
        ) from error
    for lock in description.locks:
        if (version := pins(LOCKS / lock).get(description.version_of)) is not None:
            return version
    raise EngineError(
        f"no lock file of the environment {name} pins {description.version_of}",
        expected=f"its version in one of {', '.join(description.locks)}",
    )
