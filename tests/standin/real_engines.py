"""Real engines on the CPU with the real small target, as the tests of live engines start and ask them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from standin.processes import running

from infra.config.load import load_round, round_file
from infra.config.round import EngineName
from infra.config.settings import Settings
from infra.gates.agreement import Side
from infra.gates.parity import alone, prompt_sequences, take
from infra.machine.processes.guarded import recorded
from infra.round.context import RoundContext
from infra.round.serving import Serving

SAMPLES = 6
"""Conversations that engines are compared on."""
CHUNK = 32
"""Tokens that the shared SGLang works on at once: longer prompts come in pieces."""


def smoke(engine: EngineName, settings: Settings, changes: Mapping[str, Any] | None = None) -> RoundContext:
    """The smoke round as one engine alone would do it."""
    return RoundContext(alone(load_round(round_file("smoke-sglang"), changes), engine, SAMPLES), settings)


@contextmanager
def extracting(context: RoundContext) -> Iterator[Serving]:
    """The round's extracting server, ready; at the end nothing of it may be left."""
    with Serving(context, "extract") as serving:
        serving.ready(600)
        tree = [psutil.Process(item.child_pid) for item in recorded(context.settings.run_dir) if item.alive]
        tree += [child for process in tree for child in process.children(recursive=True)]
        assert tree
        yield serving
    assert not [process for process in tree if running(process)]
    assert recorded(context.settings.run_dir) == []


@dataclass(frozen=True)
class Planted:
    """A server whose connector has the fault that a file says; none when it is empty."""

    serving: Serving
    file: Path

    def plant(self, fault: str) -> Serving:
        """The server, from now on with this fault."""
        self.file.write_text(fault)
        return self.serving


def side(serving: Serving) -> Side:
    """What an engine makes of the smoke round's prompts, for the parity gate."""
    return take(serving, prompt_sequences(serving.context))
