"""Puts the commands together. Heavy imports wait inside the commands, so that ``--help`` is quick."""

import signal
import sys
from types import FrameType

import typer

from deployments.cli import clean, doctor, engines, front, gpu, plan, round, stack, status, target
from infra.errors import Eagle3Error

app = typer.Typer(
    help="From a served model to a measured EAGLE-3 draft, as Prefect flows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("up")(stack.up)
app.command("down")(stack.down)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.command("gpu")(gpu.gpu)
app.command("clean")(clean.clean)
app.command("round")(round.run_round)
app.command("run")(round.start)
app.command("deploy")(stack.deploy)
app.command("plan")(plan.plan)
app.command("front")(front.front)
app.add_typer(target.app, name="target", help="The models that are served.")
app.add_typer(engines.app, name="engines", help="The Python environments of flows and engines.")


def main() -> int:
    """Run the command line: an error of ours is one sentence on stderr and status 1, any other is shown whole."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        app(prog_name="eagle3")
    except Eagle3Error as error:
        print(f"eagle3: {error}", file=sys.stderr)
        return 1
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """TERM and HUP end a command as Ctrl-C does, so that it cleans up."""
    raise KeyboardInterrupt
