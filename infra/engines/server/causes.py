"""What an engine's log says of its end, and of its way there: known faults with their remedies, and phases.

Wordings met with vLLM 0.32 or read in its source and SGLang's, and what Python, torch and uvicorn print under both. A
wording that is not here costs the remedy only: the log's last error line is shown instead.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A fault that a log line shows.

    Args:
        pattern: searched in the end of the log; its named groups may stand in the words.
        words: what happened, a clause without a full stop.
        remedy: what to do, a clause.
    """

    pattern: re.Pattern[str]
    words: str
    remedy: str


@dataclass(frozen=True)
class Phase:
    """Progress in starting up.

    Args:
        pattern: searched in each line.
        words: the phase; named groups may stand in it, so that "3 of 96 shards" is another phase than "4 of 96".
    """

    pattern: re.Pattern[str]
    words: str


def cause(pattern: str, words: str, remedy: str) -> Cause:
    """A known fault."""
    return Cause(re.compile(pattern), words, remedy)


def phase(pattern: str, words: str) -> Phase:
    """A phase of starting up."""
    return Phase(re.compile(pattern), words)


PORT_TAKEN = cause(
    r"[Aa]ddress already in use|[Ee]rrno 98\b|Port \d+ (is )?(not available|already in use|was already occupied)",
    "its port was taken by another process",
    "start again: another free port is chosen",
)

COMMON = (
    PORT_TAKEN,
    cause(
        r"unrecognized arguments: (?P<what>.+)",
        "this version does not know the flags {what}",
        "take them out of the rung's flags, or spell them as this version does",
    ),
    cause(
        r"error: argument (?P<what>.+)", "a flag is wrong: {what}", "mend the rung's flags in the round's engine ladder"
    ),
    cause(
        r"Invalid repository ID or local directory specified: ?(?P<what>\S*)|HFValidationError|LocalEntryNotFound|"
        r"OfflineModeIsEnabled|does not appear to have a file named (?P<file>\S+)|"
        r"(?:Cannot find any model weights with|No safetensors or bin files found in) (?P<weights>\S+)|"
        r"(?P<path>\S+) is not a local folder and is not a valid model identifier|"
        r"No such file or directory: (?P<missing>\S*(?:config\.json|\.safetensors|tokenizer\S*))",
        "the model's folder is missing or not complete {what}{file}{weights}{path}{missing}",
        "eagle3 target show says what is there, eagle3 target fetch gets it",
    ),
    cause(
        r"CUDA (?:error: )?out of memory|OutOfMemoryError|No available memory for the cache blocks|"
        r"Cannot allocate memory|less than desired (GPU|CPU) memory utilization|less than requested memory for kv|"
        r"larger than the available KV cache memory|can't allocate memory|Not enough memory|"
        r"std::bad_alloc|(?:^|\n)MemoryError",
        "there was not enough memory",
        "free what else is on the device, or give the rung less: a shorter max_model_len, fewer requests at once, a "
        "smaller memory fraction or more tensor parallelism",
    ),
    cause(
        r"no kernel image is available|CUDA driver version is insufficient|forward compatibility was attempted|"
        r"Found no NVIDIA driver|lib(?:cudart|cuda|nvrtc)\S*: cannot open|the provided PTX was compiled with|"
        r"CUDA error: (?P<what>.+)",
        "this build does not fit the GPU or its driver {what}",
        "compare `nvidia-smi` with the CUDA version the engine was built for; renew the driver or pin another build",
    ),
    cause(
        # Both engines also print `trust_remote_code=True` among their arguments.
        r"(?:argument|option|set|setting|pass)[^\n]{0,12}trust_remote_code=True|"
        r"contains custom code which must be executed",
        "the model needs its own code, and the target does not allow that",
        "set target.trust_remote_code in the round if you trust it",
    ),
    cause(
        r"No space left on device|[Ee]rrno 28\b", "a disk is full", "make room where the log says (/dev/shm counts too)"
    ),
    cause(
        r"ModuleNotFoundError: (?P<what>.+)",
        "its environment is not complete: {what}",
        "eagle3 engines install builds it anew",
    ),
)
"""Faults that both engines have, the most telling first."""

LAST_ERROR = re.compile(r"(?:^|\s)((?:[\w.]*Error|[\w.]*Exception): .+)$")


def explain(log: str, own: Sequence[Cause] = (), hollow: str = "") -> str | None:
    """One sentence for the fault that the end of a log shows: what happened, and what to do where that is known.

    Args:
        log: the end of the log.
        own: the engine's own faults; they come before the common ones.
        hollow: an error that only says that another one is above it; passed over where there is another.

    Returns:
        None when nothing in the log looks like a fault.
    """
    for known in (*own, *COMMON):
        if match := known.pattern.search(log):
            return f"{filled(known.words, match)}; {known.remedy}"
    errors = [match.group(1) for line in log.splitlines() if (match := LAST_ERROR.search(line))]
    specific = [error for error in errors if not hollow or hollow not in error]
    return (specific or errors)[-1] if errors else None


def words_of(line: str, phases: Sequence[Phase]) -> str | None:
    """The phase that a line marks, with its numbers; None for other lines."""
    for known in phases:
        if match := known.pattern.search(line):
            return filled(known.words, match)
    return None


def port_was_taken(log: str) -> bool:
    """Whether the server ended because somebody else had its port: the rung is not at fault."""
    return PORT_TAKEN.pattern.search(log) is not None


def filled(words: str, match: re.Match[str]) -> str:
    """``words`` with the match's named groups put in; what did not match is left out."""
    groups = defaultdict(str, {name: text.strip() for name, text in match.groupdict().items() if text})
    return " ".join(words.format_map(groups).split())
