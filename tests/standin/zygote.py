"""Starts flows in no time, since all is imported once and each run is a fork: ``python -m standin.zygote``.

A line of JSON on stdin, ``{"round": fields, "environment": {...}, "log": file}``, starts the flow eagle3. If the
environment names STANDIN_JOURNAL, the stand-in is in vLLM's place and the flow is followed (``standin.place``). A line
on stdout says the run's pid, and the next one, when it has ended, its status (negative: a signal's number).
"""

import json
import os
import signal
import sys
import traceback
from typing import Any

from standin.place import install

from flows.eagle3 import eagle3
from infra.config.load import build_round
from infra.machine.processes.guard import PR_SET_PDEATHSIG, prctl


def run(asked: dict[str, Any]) -> int:
    """The flow, in the fork; its exit status."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(asked["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(descriptor, stream)
    os.environ.update(asked["environment"])
    place = install() if "STANDIN_JOURNAL" in os.environ else None
    try:
        eagle3(build_round(asked["round"]))
    except Exception:
        traceback.print_exc()
        return 1
    if place is not None:
        place.leave()
    return 0


def main() -> None:
    """Serve until stdin ends."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = run(json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
