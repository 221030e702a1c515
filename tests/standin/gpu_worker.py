"""Answers questions about the stand-in GPUs in a process of its own, many in a row; see ``standin.gpus``.

stdin carries a JSON line a question (as ``GpuBox.clear`` asks it), stdout JSON lines: ``{"say": line}`` while it works,
then ``{"done": facts}``.
"""

import json
import logging
import os
import sys
from pathlib import Path

from infra.config.policies import GpuConfig
from infra.machine.gpus.policy import Clearing, View


class _Answers(logging.Handler):
    """Answers with what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        answer(say=record.getMessage())


def main() -> None:
    logging.basicConfig(level=logging.INFO, handlers=[_Answers()])
    for line in sys.stdin:
        question = json.loads(line)
        os.environ.update(question["environment"])
        policy = GpuConfig(**question["policy"])
        view = View(
            Path(question["run_dir"]),
            alone=question["alone"],
            share=policy.free,
            whole=question["whole"],
            kernel_log=Path(question["kernel_log"]),
        )
        clearing = Clearing(policy, view, question["wanted"])
        cleared = clearing.run()
        answer(
            done={
                "enough": cleared.enough,
                "fit": [finding.gpu.index for finding in cleared.fit],
                "unfit": [str(finding) for finding in cleared.unfit],
                "acts": [{"action": act.action, "gpus": act.gpus, "text": act.text} for act in cleared.acts],
            }
        )


def answer(**message: object) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
