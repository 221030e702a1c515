"""Runs the flow eagle3 in a process of its own, with the stand-in in vLLM's place: ``python -m standin.child ROUND``.

ROUND is a JSON file with the round's fields; settings come by the environment. With STANDIN_BLIND_GUARD the disk guard
does not look ahead, so that writes find the disk full.
"""

import json
import os
import sys
from pathlib import Path

from standin.engine import StandInEngine

from infra.disk.guard import DiskGuard
from infra.engines.vllm import engine as vllm


def main() -> None:
    """Run the round; a failure ends the process with a traceback."""
    from flows.eagle3 import eagle3
    from infra.config.load import build_round

    vllm.ENGINE = StandInEngine()
    if "STANDIN_BLIND_GUARD" in os.environ:
        DiskGuard.before = lambda self, what, **needs: None  # type: ignore[method-assign]
    eagle3(build_round(json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
