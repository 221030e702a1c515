"""Starting engines: the one entry point, whichever engine it is.

A new engine is a new module ``infra/engines/<name>.py`` whose ``ENGINE`` satisfies :class:`Engine`.
"""

from importlib import import_module
from importlib.util import find_spec

from infra.config.settings import Settings
from infra.engines.launch import Engine, Launch, LaunchRequest, Profile
from infra.engines.server.server import Server
from infra.environments.descriptions import LOCKS, describe, pins
from infra.errors import EngineError, EnvironmentBuildError

__all__ = [
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


def find_engine(name: str) -> Engine:
    """The engine module called ``name``.

    Raises:
        EngineError: there is no such engine.
    """
    if not name.isidentifier() or find_spec(f"infra.engines.{name}") is None:
        raise EngineError(
            f"there is no engine {name!r}", expected="the name of a module in infra/engines that has an ENGINE"
        )
    engine: Engine | None = getattr(import_module(f"infra.engines.{name}"), "ENGINE", None)
    if engine is None:
        raise EngineError(f"there is no engine {name!r}", expected="a module in infra/engines that has an ENGINE")
    return engine


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
