"""Where the plugin reaches into SGLang: one class, two methods, the same from 0.5.14 to 0.5.23.

``tests/standin/recorded/sglang-releases.json`` records what each release has of them.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from . import LAYER_IDS, STAGING
from .capture import Capture

WORKER = "sglang.srt.managers.tp_worker.TpModelWorker"
CAPTURE = "eagle3_capture"


def register_hooks() -> None:
    """Capture starts when a worker has loaded the target, and looks at each of its forwards."""
    HookRegistry.register(f"{WORKER}.__init__", worker_made, HookType.AFTER)
    HookRegistry.register(f"{WORKER}.forward_batch_generation", forward, HookType.AROUND)


def worker_made(result: None, worker: Any, *args: Any, **kwargs: Any) -> None:
    """Make the loaded target capture; an error here ends the server's start."""
    if not worker.is_draft_worker:
        capture = Capture(worker.model_runner.model, json.loads(os.environ[LAYER_IDS]), Path(os.environ[STAGING]))
        setattr(worker, CAPTURE, capture)


def forward(original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    """One forward of a batch, and the states it gave to the requests that want them."""
    capture: Capture | None = getattr(worker, CAPTURE, None)
    if capture is None or batch is None:
        return original(worker, batch, *args, **kwargs)
    capture.begin()
    result = original(worker, batch, *args, **kwargs)
    capture.end(batch, result)
    return result
