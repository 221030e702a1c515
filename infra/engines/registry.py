"""The engines that a round can name, and starting one: the one entry point, whichever engine it is.

A new engine is a folder ``infra/engines/<name>/`` whose ``engine.py`` has an ``ENGINE`` that satisfies :class:`Engine`,
and a line in :data:`ENGINES`.
"""

from importlib import import_module
from typing import cast

from infra.config.settings import Settings
from infra.engines.launch import Engine, Launch, LaunchRequest, Profile
from infra.engines.server.server import Server
from infra.environments.descriptions import LOCKS, describe, pins
from infra.errors import EngineError, EnvironmentBuildError

__all__ = [
    "ENGINES",
    "Engine",
    "Launch",
    "LaunchRequest",
    "Profile",
    "Server",
    "engine_version",
    "find_engine",
    "planned_version",
    "start",
]

ENGINES = {
    "vllm": "infra.engines.vllm.engine",
    "sglang": "infra.engines.sglang.engine",
}
"""Where each engine's ``ENGINE`` is; imported when it is first asked for."""


def find_engine(name: str) -> Engine:
    """The engine called ``name``.

    Raises:
        EngineError: there is no such engine.
    """
    if name not in ENGINES:
        raise EngineError(f"there is no engine {name!r}", expected=f"one of {', '.join(ENGINES)}")
    return cast(Engine, import_module(ENGINES[name]).ENGINE)


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
        description = describe(f"{engine}-{device}")
        return next(
            pinned[description.version_of]
            for pinned in (pins(LOCKS / lock) for lock in description.locks)
            if description.version_of in pinned
        )
