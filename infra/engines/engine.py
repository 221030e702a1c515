"""What an engine's folder must say of it: everything that differs between engines, and that others ask for.

A new engine is a folder ``infra/engines/<name>/`` whose ``engine.py`` has an ``ENGINE`` that satisfies :class:`Engine`,
its name in ``EngineName`` (``infra/config/round.py``), an environment ``<name>-cpu`` or ``<name>-cuda`` in
``infra/environments/locks``, and a line in the contract of ``pyproject.toml`` that keeps engines apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from transformers import PretrainedConfig

from infra.config.round import EngineConfig, TargetShape
from infra.engines.client.client import Client
from infra.engines.client.dialect import Dialect
from infra.engines.client.extraction import Extractor
from infra.engines.draft import DraftLayout
from infra.engines.launch import Launcher, LaunchRequest
from infra.engines.layer_ids import Numbering
from infra.errors import ConfigError
from infra.targets.target import Target
from infra.targets.text import open_text


class Engine(Launcher, Protocol):
    """What a module ``infra.engines.<name>.engine`` provides as its ``ENGINE``."""

    @property
    def title(self) -> str:
        """Its name as people write it."""
        ...

    @property
    def library(self) -> str:
        """The library of the drafts that it loads, as the model hub's ``library_name``."""
        ...

    @property
    def dialect(self) -> Dialect:
        """What its server's API understands."""
        ...

    @property
    def numbering(self) -> Numbering:
        """How it numbers the layers that it captures, and that feed a draft."""
        ...

    @property
    def final_slot(self) -> Literal["pre_norm", "unit_rms"]:
        """What its extractor gives as tap L; see :class:`~infra.store.manifest.StatesMeta`."""
        ...

    @property
    def wrappers(self) -> frozenset[str]:
        """``model_type`` of targets of several parts whose language model it is known to capture."""
        ...

    @property
    def limits(self) -> tuple["Limit", ...]:
        """What it alone cannot do; what no engine can is in :mod:`infra.engines.limits`."""
        ...

    @property
    def layout(self) -> DraftLayout | None:
        """The draft's layout for it; None when it loads a draft as the trainer writes it."""
        ...

    def extractor(self, client: Client, request: LaunchRequest, version: str) -> Extractor:
        """The extraction side of a server that was launched for ``request``; it has proved itself where it must.

        Raises:
            EngineError: the server's extraction does not work.
        """
        ...

    def serve_command(self, target: str, draft: str, drafts: int) -> str:
        """The command by which people serve a target with a draft that proposes ``drafts`` tokens a step."""
        ...


@dataclass(frozen=True)
class Use:
    """One engine and what it is to do.

    Args:
        engine: the engine.
        version: its version.
        config: how the round runs it.
        name: the target's name.
        shape: its shape.
        target: the target; None while it is not on this machine.
        taps: taps to capture, or that the draft is fed; ascending.
        captures: whether it gives hidden states.
        drafts: whether it serves with a draft.
    """

    engine: Engine
    version: str
    config: EngineConfig
    name: str
    shape: TargetShape
    target: Target | None
    taps: tuple[int, ...]
    captures: bool
    drafts: bool

    @classmethod
    def of(cls, engine: Engine, version: str, request: LaunchRequest) -> "Use":
        """What a launch asks for."""
        target, here = request.target, (request.target.path / "config.json").is_file()
        captures, drafts = request.profile == "extract", request.draft is not None
        return cls(
            *(engine, version, request.config, target.name, target.shape, target if here else None),
            *(request.taps, captures, drafts),
        )

    @cached_property
    def text(self) -> PretrainedConfig | None:
        """The config of the target's language model; None while it is not here, or where transformers has no class."""
        try:
            return open_text(self.target.path) if self.target is not None else None
        except ConfigError:
            return None


Limit = Callable[[Use], str | None]
"""One thing that an engine cannot do: a sentence where the use asks for it, else None."""
