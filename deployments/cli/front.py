"""``eagle3 front``: a round's hidden states over HTTP, in the shape that speculators' own commands ask for."""

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.cli.output import Json, print_json, say
from deployments.cli.rounds import Set, open_round
from infra.config.settings import Settings

if TYPE_CHECKING:
    from infra.engines.client.front import Front
    from infra.round.context import RoundContext

CHECK_SECONDS = 2.0
NO_DATASET = "DATASET"
"""Stands in the printed commands for a folder made by `speculators prepare-data`."""


def front(
    name: Annotated[str, typer.Argument(help="Name of a round, or the path of its YAML file.")],
    overrides: Set = None,
    port: Annotated[int, typer.Option(help="Loopback port; 0 takes a free one.", min=0, max=65535)] = 0,
    as_json: Json = False,
) -> None:
    """Start the round's extracting engine and serve its states to speculators' own client, until Ctrl-C.

    `speculators generate-offline-data` and `speculators train --on-missing generate` then work with any engine of
    ours, SGLang too. Both ends must see the same files.
    """
    from infra.engines.client.front import Front
    from infra.errors import EngineError
    from infra.round.context import RoundContext
    from infra.round.serving import Serving

    config = open_round(name, overrides)
    context = RoundContext(config, Settings())
    _prepare(context)
    with context.lock(), Serving(context, "extract") as serving:
        extractor = serving.extractor(config.extract.timeout_seconds)
        server = serving.server
        if server is None:
            raise EngineError(f"{serving.name} ended while it was being started")
        served = Front(
            extractor,
            str(context.target.path),
            context.target.shape.vocab_size,
            context.scratch / "front",
            concurrency=config.extract.concurrency,
            port=port,
            healthy=server.check,
        )
        with served as running:
            _tell(context, running, as_json)
            try:
                while True:
                    time.sleep(CHECK_SECONDS)
                    server.check()
            except KeyboardInterrupt:
                say(f"ended; {running.served} requests were answered")


def commands(context: "RoundContext", running: "Front", dataset: str) -> dict[str, list[str]]:
    """speculators' commands that use the front, by name; the training wants a GPU."""
    tool = str(Path(sys.executable).with_name("speculators"))
    endpoint, config = f"{running.address}/v1", context.config
    return {
        "generate-offline-data": [
            tool, "generate-offline-data", "--endpoint", endpoint, "--model", running.model,
            "--preprocessed-data", dataset, "--concurrency", str(config.extract.concurrency), "--validate-outputs",
        ],
        "train": [
            tool, "train", "--speculator-type", "eagle3", "--verifier-name-or-path", running.model,
            "--data-path", dataset, "--vllm-endpoint", endpoint, "--on-missing", "generate",
            "--target-layer-ids", *map(str, config.extract.taps), "--draft-arch", "llama", "--num-layers", "1",
            "--full-attention-indices", "0", "--no-norm-before-residual",
            "--total-seq-len", str(config.train.sequence_tokens), "--save-path", "DRAFT",
        ],
    }  # fmt: skip


def _prepare(context: "RoundContext") -> None:
    """Environment and target, where they are missing."""
    from infra.environments.building import build
    from infra.targets.fetch import fetch_target

    settings, target = context.settings, context.config.target
    build(f"{context.config.extract.engine}-{context.extracting.device}", settings.cache_dir)
    if target.fetch and target.source and not (settings.models_dir / target.name / "config.json").is_file():
        fetch_target(target, settings.models_dir, settings.cache_dir)


def _tell(context: "RoundContext", running: "Front", as_json: bool) -> None:
    dataset = _dataset(context)
    lines = commands(context, running, dataset or NO_DATASET)
    if as_json:
        print_json({"address": running.address, "model": running.model, "dataset": dataset, "commands": lines})
        sys.stdout.flush()
        return
    engine = context.config.extract.engine
    print(f"states of {running.model} from {engine} {context.versions[engine]} at {running.address}/v1")
    if dataset is None:
        print(f"the round has no samples yet: {NO_DATASET} is a folder made by `speculators prepare-data`")
    for line in lines.values():
        print(shlex.join(line))
    print("Ctrl-C ends it", flush=True)


def _dataset(context: "RoundContext") -> str | None:
    """The round's samples as speculators' dataset, when they are prepared."""
    from infra.drafter.dataset import write_dataset
    from infra.round.stored import samples_done

    if not samples_done(context):
        return None
    folder = context.scratch / "front-dataset"
    write_dataset(context.samples, folder, None)
    return str(folder)
