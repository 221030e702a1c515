"""Work that survives a server's death: started anew, and what kills the server left out.

for attempt in survive(serving, samples=100, share=0.01):
    with attempt:
        client = serving.watched(timeout)
        for sample in attempt.suspects():
            ...                     # tried alone
        ...                         # the rest, without attempt.quarantined
"""

from collections.abc import Collection, Iterator
from types import TracebackType

from infra.errors import EngineError
from infra.round.serving import Serving


class TooManyDeaths(EngineError):
    """The server died too often, or too many samples kill it: the engine is at fault, and another try is no use."""


def survive(serving: Serving, samples: int, share: float, earlier: int = 0) -> "Iterator[Attempt]":
    """Attempts at a step's work, one a server, until one of them goes through.

    Whatever was in flight when a server died is suspect, and is to be tried alone on the next server before the rest.
    A suspect that is alone in flight when that one dies too is quarantined.

    Args:
        serving: the step's server.
        samples: how many there are.
        share: largest share of them that may be quarantined; one always may.
        earlier: how many of them earlier runs left out.
    """
    attempt = Attempt(serving, max(1, int(share * samples)), earlier)
    while not attempt.went_through:
        yield attempt


class Attempt:
    """One attempt, and what is known of the deaths before it; a context manager that swallows the server's death.

    Attributes:
        quarantined: samples left out, each with why.
        went_through: whether the work was done to its end.

    Raises:
        TooManyDeaths: the bound of restarts or of quarantined samples is passed.
        EngineError: no server comes up, or the live server answers wrongly.
    """

    def __init__(self, serving: Serving, most: int, earlier: int) -> None:
        self.quarantined: dict[str, str] = {}
        self.went_through = False
        self._serving, self._most, self._earlier = serving, most, earlier
        self._suspects: list[str] = []
        self._unexplained = 0

    def suspects(self) -> Iterator[str]:
        """Samples to be tried alone, nothing else being in flight; one that comes through is no suspect any more."""
        while self._suspects:
            yield self._suspects[0]
            del self._suspects[0]

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self.went_through = True
            return False
        if not isinstance(error, EngineError):
            return False
        why = self._serving.death(error)
        if why is None:
            return False
        self._died(why, self._serving.flights.lost())
        self._serving.stop()
        return True

    def _died(self, why: str, lost: Collection[str]) -> None:
        if len(lost) == 1 and set(lost) <= set(self._suspects):
            self._quarantine(next(iter(lost)), why)
            return
        self._unexplained += 1
        most = self._serving.config.max_restarts + len(self.quarantined)
        if self._unexplained > most:
            raise TooManyDeaths(
                f"{self._serving.name} died {self._unexplained} times in this step, the last time: {why}",
                expected=f"at most {most} restarts (engines.{self._serving.engine}.max_restarts)",
                fix="read the server's log; what is done is kept, and the next run goes on from there",
            )
        self._suspects += sorted(set(lost) - set(self._suspects))
        self._serving.tell("restart", f"started anew after it died with {len(lost)} requests open: {why}")

    def _quarantine(self, sample: str, why: str) -> None:
        self._suspects.remove(sample)
        self.quarantined[sample] = why
        self._serving.tell("quarantine", f"sample {sample} is left out, the server died on it twice: {why}")
        count = self._earlier + len(self.quarantined)
        if count > self._most:
            raise TooManyDeaths(
                f"{self._serving.name} died on {count} samples, each alone: {', '.join(sorted(self.quarantined))}",
                expected=f"at most {self._most} of them (max_quarantined)",
                fix=f"it is the engine rather than the samples: read its log ({why}), or take another rung or version",
            )
