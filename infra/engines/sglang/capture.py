"""What the capture plugin inside SGLang says of the states it wrote (``plugins/eagle3_sglang``)."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from infra.errors import ExtractionFault

PLUGIN = Path(__file__).parents[1] / "plugins" / "eagle3_sglang"
"""To be put on the path of a server that captures: the package and the metadata that SGLang finds it by."""
STAGING = "EAGLE3_CAPTURE_STAGING"
LAYER_IDS = "EAGLE3_CAPTURE_IDS"
RID_PREFIX = "eagle3-"
"""Requests whose ``rid`` starts so are captured; the rest of it must be new for every request."""
KEY = "eagle3"


class Captured(NamedTuple):
    """What was captured.

    Args:
        path: the file of states, being written.
        layer_ids: the ids that the plugin handed to the model's ``set_eagle3_layers_to_capture``.
    """

    path: str
    layer_ids: tuple[int, ...]


def captured(meta_info: Mapping[str, Any]) -> Captured:
    """Read the ``meta_info`` of an answer of ``POST /generate``.

    Raises:
        ExtractionFault: the plugin is not in the server, is another than this checkout's, or has no states.
    """
    texts = meta_info.get(KEY)
    if not texts:
        raise ExtractionFault(
            "SGLang answered without a word of the capture plugin, so the server runs without it",
            expected=f"meta_info.{KEY} in the answer to a request whose rid begins with {RID_PREFIX}",
            fix="read the server's log from 'Available plugins' on",
        )
    report = json.loads(texts[-1])
    if report["plugin"] != plugin_digest():
        raise ExtractionFault(
            f"the capture plugin inside SGLang (digest {report['plugin'][:12]}) is not the one of this checkout",
            expected=f"digest {plugin_digest()[:12]} of {PLUGIN.name}",
            fix="uninstall any other eagle3-sglang from the engine's environment and start the server again",
        )
    if "error" in report:
        raise ExtractionFault(f"SGLang gave no states: {report['error']}")
    return Captured(report["file"], tuple(report["layer_ids"]))


@cache
def plugin_digest() -> str:
    """SHA-256 of this checkout's plugin, by the rule of its ``digest.py``."""
    content = hashlib.sha256()
    for module in sorted((PLUGIN / PLUGIN.name).glob("*.py")):
        content.update(module.name.encode() + b"\0" + module.read_bytes() + b"\0")
    return content.hexdigest()
