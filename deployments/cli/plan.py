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

    Exit status 1 if the plan gate would refuse the round here.
    """
    config = open_round(name, overrides)
    from infra.errors import GateError
    from infra.round.context import Round
    from infra.steps.plan import make_plan, plan_gate

    say(f"reading the prompts of {config.name} ...")
    result, refused = make_plan(Round(config, Settings())), ""
    try:
        plan_gate(config, result)
    except GateError as error:
        refused = str(error)
    if as_json:
        print_json(result.model_dump(mode="json") | {"refused": refused})
    else:
        show(result)
        if refused:
            print(f"here the round would be refused: {refused}")
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
