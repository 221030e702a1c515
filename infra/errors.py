"""The project's one exception family."""

import time
from pathlib import Path
from typing import Literal

Gate = Literal["plan", "data", "parity", "convention", "capture", "training", "serving", "disk"]
"""The gates; docs/architecture.md says when each stops and where it stands."""


class Eagle3Error(Exception):
    """Something a person must read: what happened, what was expected, what to do.

    Args:
        what: what was found, naming the thing.
        expected: what should have been there instead.
        fix: the command or change that mends it.
    """

    def __init__(self, what: str, *, expected: str = "", fix: str = "") -> None:
        self.what, self.expected, self.fix = what, expected, fix
        parts = [what.rstrip(".")]
        if expected:
            parts.append(f"Expected: {expected.rstrip('.')}")
        if fix:
            parts.append(f"To mend it: {fix.rstrip('.')}")
        super().__init__(". ".join(parts) + ".")


class ConfigError(Eagle3Error):
    """A round, an override or a setting cannot be used as written."""


class MissingTarget(Eagle3Error):
    """The target's files are not on this machine, or not complete."""


class MissingDraft(MissingTarget):
    """The draft that training is to start from is not on this machine, or not complete."""


class EnvironmentBuildError(Eagle3Error):
    """A Python environment could not be built or is not usable."""


class ProcessFailed(Eagle3Error):
    """A process this project started ended badly or could not be started."""


class EngineError(Eagle3Error):
    """An engine did not start, stopped answering, or answered wrongly."""


class ExtractionFault(EngineError):
    """States that must not be used: missing, incomplete, or not of the tokens that were sent."""


class StoreError(Eagle3Error):
    """An object in the store is missing, damaged, or could not be written."""


class DiskFull(StoreError):
    """Something could not be written because its file system, or a quota on it, has no room; nothing is left of it.

    Attributes:
        at: when, ``time.monotonic()`` seconds.
        place: a folder of that file system; None when it is not known.
    """

    def __init__(self, what: str, *, expected: str = "", fix: str = "", place: Path | None = None) -> None:
        self.at, self.place = time.monotonic(), place
        super().__init__(what, expected=expected, fix=fix)


class TrainingError(Eagle3Error):
    """The trainer ended without the draft that was asked for."""


class PreflightError(Eagle3Error):
    """This machine lacks something that the round needs."""


class GateError(Eagle3Error):
    """A gate stopped the round.

    Args:
        gate: which one.
    """

    def __init__(self, gate: Gate, what: str, *, expected: str = "", fix: str = "") -> None:
        self.gate = gate
        super().__init__(f"{gate} gate: {what}", expected=expected, fix=fix)
