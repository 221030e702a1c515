"""The real trainer, which waits for a file after a step.

``python gated_trainer.py STEPS FILE [arguments of infra.drafter.trainer_entry]``
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from infra.drafter import trainer_entry
from infra.drafter.trainer_entry import Events


def main(steps: int, file: Path, arguments: Sequence[str]) -> None:
    """Train; after so many steps, once their metrics are written, only when ``file`` is there."""
    write = Events.write

    def write_and_wait(self: Events, event: dict[str, Any]) -> None:
        write(self, event)
        if "train" in event and event["global_step"] + 1 == steps:
            while not file.exists():
                time.sleep(0.02)

    with patch.object(Events, "write", write_and_wait):
        trainer_entry.main(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
