"""Puts the commands together. Heavy imports wait inside the commands, so that ``--help`` is quick."""

import errno
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from deployments.cli import clean, doctor, engines, fields, front, gpu, output, plan, round, stack, status, target
from deployments.environment import stand_in_for_flows
from infra import __version__
from infra.errors import Eagle3Error, ProcessFailed
from infra.machine.network import check_network, reach_loopback

MACHINE_FAULTS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.ENOTDIR, errno.EISDIR,
     errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO}
)  # fmt: skip
"""What a file or folder of the machine can be to blame for, rather than the code."""

USAGE = 2
"""Exit status of a command line that cannot be read; Typer has said on stderr what is wrong."""

INTERRUPTED = 130
"""Exit status of a command that was interrupted, as shells have it for Ctrl-C."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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
app.command("fields")(fields.fields)
app.command("front")(front.front)
app.add_typer(target.app, name="target", help="The models that are served.")
app.add_typer(engines.app, name="engines", help="The Python environments of flows and engines.")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"eagle3 {__version__}")
        raise typer.Exit


@app.callback()
def whole(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """From a served model to a measured EAGLE-3 draft, as Prefect flows."""


def main() -> int:
    """Run the command line: a foreseeable error is one sentence on stderr and status 1, any other is shown whole.

    With ``--json`` the error is on stdout as well, unless the command's facts are there already. A command that is
    interrupted (Ctrl-C, TERM, HUP) cleans up, says so in one line and ends with status 130.
    """
    output.facts_printed = False
    stand_in_for_flows()
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        with output.log_said():
            _look_at_network(sys.argv[1:])
            app(prog_name="eagle3")
        return 0
    except Eagle3Error as error:
        return _failed(error)
    except KeyboardInterrupt:
        return interrupted()
    except SystemExit as ended:
        if ended.code == USAGE:
            _tell_json(Eagle3Error("the command line cannot be read", expected="what `--help` shows"))
        if ended.code != INTERRUPTED:  # which is how Typer ends on KeyboardInterrupt, without a word
            raise
        return interrupted()
    except OSError as error:
        if error.filename is None or error.errno not in MACHINE_FAULTS:
            _tell_json(_unforeseen(error))
            raise
        return _failed(
            ProcessFailed(
                f"{error.filename} cannot be used: {error.strerror}",
                fix="see that it is there, that its disk has room, and that this user may write to it",
            )
        )
    except Exception as error:  # shown whole, as a fault of the code
        _tell_json(_unforeseen(error))
        raise


def interrupted() -> int:
    """Say that the command was interrupted; its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: a second Ctrl-C would only spoil Python's own ending
    return _failed(Eagle3Error("interrupted"), INTERRUPTED)


def _look_at_network(words: list[str]) -> None:
    """See that proxies and certificates can be used, for Prefect cannot be imported beside some that cannot.

    Help is given all the same, and `eagle3 doctor` says it among other things.
    """
    if told := reach_loopback():
        output.say(told)
    if words and not {"--help", "doctor"} & set(words):
        check_network()


def _failed(error: Eagle3Error, status: int = 1) -> int:
    print(f"eagle3: {error}", file=sys.stderr)
    _tell_json(error)
    return status


def _unforeseen(error: Exception) -> Eagle3Error:
    return Eagle3Error(f"{type(error).__name__}: {error}", fix="this is a fault of eagle3: its traceback is on stderr")


def _tell_json(error: Eagle3Error) -> None:
    """The error on stdout, where facts were asked for as JSON and there are none."""
    if "--json" in sys.argv[1:] and not output.facts_printed:
        output.print_json({"error": {"what": error.what, "expected": error.expected, "fix": error.fix}})


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """TERM and HUP end a command as Ctrl-C does, so that it cleans up."""
    raise KeyboardInterrupt
