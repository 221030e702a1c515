"""What engines are asked to launch, where tests read their command lines."""

from pathlib import Path
from typing import Any

from infra.config.round import EngineConfig, TargetShape
from infra.engines.launch import LaunchRequest, Profile
from infra.targets.target import Target


def request(profile: Profile, config: EngineConfig, family: str, trust: bool, **more: Any) -> LaunchRequest:
    """A small target of a family, asked for by a round; ``more`` is the rest of the request."""
    shape = TargetShape(layers=30, hidden_size=576, vocab_size=49152, weight_bytes=1, family=family)
    target = Target(name="tiny", path=Path("/models/tiny"), shape=shape, revision="r", trust_remote_code=trust)
    return LaunchRequest(target, config, profile, **more)


def flag(command: tuple[str, ...], name: str) -> str:
    """The value of an option."""
    return command[command.index(name) + 1]
