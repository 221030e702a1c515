"""``eagle3 plan``: what a round would need, without starting anything."""

from typing import TYPE_CHECKING, Annotated

import typer

from deployments.cli.output import Json, print_json, print_table, say
from deployments.cli.rounds import Set, open_round
from infra.config.settings import Settings
from infra.units import duration, size

if TYPE_CHECKING:
    from infra.steps.plan import Plan


def plan(
    name: Annotated[str, typer.Argument(help="Name of a round, or the path of its YAML file.")],
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Show samples, tokens, disk, memory, time, and which steps are already done.

    Exit status 1 if the round would be refused, with every reason: its target, engines, trainer or layout cannot do
    what it asks, or it does not fit here.
    """
    config = open_round(name, overrides)
    from infra.errors import GateError
    from infra.machine.gpus.readings import gpus
    from infra.round.checks import refusals
    from infra.round.context import RoundContext
    from infra.round.preflight import machine_faults
    from infra.steps.plan import make_plan, plan_gate

    say(f"reading the prompts of {config.name} ...")
    settings = Settings()
    result = make_plan(RoundContext(config, settings))
    lacks = tuple(f"this machine cannot run it: {fault}" for fault in machine_faults(config, gpus()))
    result = result.model_copy(update={"notes": (*result.notes, *lacks)})
    say("asking engines and trainer what they cannot do ...")
    refused = refusals(config, settings)
    try:
        plan_gate(config, result)
    except GateError as error:
        refused.append(str(error))
    if as_json:
        print_json(result.model_dump(mode="json") | {"refused": " ".join(refused)})
    else:
        show(result)
        for reason in refused:
            print(f"here the round would be refused: {reason}")
    raise typer.Exit(1 if refused else 0)


def show(result: "Plan") -> None:
    """Print a plan for a person."""
    facts = [
        ("samples", f"{result.samples:,}"),
        ("tokens", f"{result.tokens:,} ({result.prompt_tokens:,} of prompts, {result.answer_tokens:,} of answers)"),
        ("bytes a token", f"{result.bytes_per_token:,}"),
        ("shards", f"{result.shards:,}"),
        ("disk, at most", size(result.disk_bytes)),
        *(
            (f"still to {' and '.join(room.folders)} on {room.mount}", f"{size(room.needed)} of {size(room.free)} free")
            for room in result.rooms
        ),
        ("memory of the host", f"{size(result.memory_bytes)} of {size(result.memory_free)} available"),
        *((("memory of each GPU, at least", size(result.gpu_bytes)),) if result.gpu_bytes else ()),
        ("time", duration(result.seconds)),
    ]
    print_table(f"plan of {result.round}", ["what", "estimate"], facts)
    steps = [
        (
            step.step,
            step.key or "not known yet",
            "done" if step.done else "to do",
            duration(step.seconds),
            size(step.disk_bytes),
            step.what,
        )
        for step in result.steps
    ]
    print_table("steps", ["step", "key", "state", "time", "disk", "what"], steps)
    for note in result.notes:
        print(f"note: {note}")
