"""Lines with which engines end, and where each engine has their words: an invented line would prove nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """A line of an engine's log.

    Attributes:
        engine: whose environment has the words.
        module: file with the words, below ``site-packages``.
        words: the words as they stand there.
        line: as the log has them.
        said: parts of what is said of it: what happened, and the remedy.
    """

    engine: str
    module: str
    words: str
    line: str
    said: tuple[str, str]


WORDINGS = (
    Wording(
        "vllm", "vllm/transformers_utils/config.py", "Invalid repository ID or local directory specified",
        "ValueError: Invalid repository ID or local directory specified: '/models/x'.",
        ("the model's folder is missing or not complete '/models/x'", "eagle3 target fetch"),
    ),
    Wording(
        "vllm", "transformers/utils/hub.py", "does not appear to have a file named",
        "OSError: /models/x does not appear to have a file named config.json.",
        ("missing or not complete config.json", "eagle3 target"),
    ),
    Wording(
        "sglang", "sglang/srt/model_executor/pool_configurator.py", "Not enough memory. Please try to increase --mem-",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        ("not enough memory", "free"),
    ),
    Wording(
        "vllm", "transformers/dynamic_module_utils.py", "contains custom code which must be executed",
        "ValueError: The repository contains custom code which must be executed to correctly load the model.",
        ("needs its own code", "target.trust_remote_code"),
    ),
    Wording(
        "vllm", "vllm/v1/engine/utils.py", "Engine core initialization failed",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        ("Engine core initialization failed", ""),
    ),
)  # fmt: skip
