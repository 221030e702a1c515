"""Code that runs inside SGLang's processes; it imports nothing of the project that launches it.

SGLang (0.5.14 and newer) finds :func:`register` by its entry point, so the folder of this package, which also holds
its metadata, need only be on the path.
"""

import os

STAGING = "EAGLE3_CAPTURE_STAGING"
"""Environment: the folder that states are written to; without it, nothing is captured."""
LAYER_IDS = "EAGLE3_CAPTURE_IDS"
"""Environment: JSON list of SGLang's own layer ids, handed to the model's ``set_eagle3_layers_to_capture``."""


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``; SGLang calls it in each of its processes."""
    if STAGING not in os.environ:
        return
    from .hooks import register_hooks

    register_hooks()


__all__ = ["LAYER_IDS", "STAGING", "register"]
