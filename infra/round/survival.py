"""Going on when a server dies in the middle of a step: started anew, and what kills it left out."""

from collections.abc import Callable, Collection
from typing import TypeVar

from infra.errors import EngineError
from infra.round.serving import Serving

Connection = TypeVar("Connection")


class TooManyDeaths(EngineError):
    """The server died too often, or too many samples kill it: the engine is at fault, and another try is no use."""


class Survival:
    """What is known of a step's deaths: the samples that were in flight, and those that proved to be the cause.

    Whatever was in flight when a server died is suspect, and is tried alone on the next server before the rest. A
    suspect that is alone in flight when that one dies too is quarantined.

    Attributes:
        suspects: samples to be tried alone, in order.
        quarantined: samples left out, each with why.

    Args:
        serving: the step's server.
        samples: how many there are.
        share: largest share of them that may be quarantined; one always may.
        earlier: how many of them earlier attempts left out.
    """

    def __init__(self, serving: Serving, samples: int, share: float, earlier: int = 0) -> None:
        self.suspects: list[str] = []
        self.quarantined: dict[str, str] = {}
        self._serving, self._earlier = serving, earlier
        self._most = max(1, int(share * samples))
        self._unexplained = 0

    def run(
        self,
        connect: Callable[[], Connection],
        trial: Callable[[Connection, str], None],
        work: Callable[[Connection], None],
    ) -> None:
        """Do ``work`` until it is done, on as many servers as it takes.

        Args:
            connect: brings a server up and gives what talks to it.
            trial: tries one suspect, nothing else being in flight.
            work: goes on where the last call ended; leaves out what is ``quarantined``.

        Raises:
            TooManyDeaths: the bound of restarts or of quarantined samples is passed.
            EngineError: no server comes up, or the live server answers wrongly.
        """
        while True:
            connection = connect()
            try:
                while self.suspects:
                    trial(connection, self.suspects[0])
                    del self.suspects[0]
                work(connection)
                return
            except EngineError as error:
                why = self._serving.death(error)
                if why is None:
                    raise
                self._died(why, self._serving.flights.lost())
                self._serving.stop()

    def _died(self, why: str, lost: Collection[str]) -> None:
        if len(lost) == 1 and set(lost) <= set(self.suspects):
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
        self.suspects += sorted(set(lost) - set(self.suspects))
        self._serving.note("restart", f"started anew after it died with {len(lost)} requests open: {why}")

    def _quarantine(self, sample: str, why: str) -> None:
        self.suspects.remove(sample)
        self.quarantined[sample] = why
        self._serving.note("quarantine", f"sample {sample} is left out, the server died on it twice: {why}")
        count = self._earlier + len(self.quarantined)
        if count > self._most:
            raise TooManyDeaths(
                f"{self._serving.name} died on {count} samples, each alone: {', '.join(sorted(self.quarantined))}",
                expected=f"at most {self._most} of them (max_quarantined)",
                fix=f"it is the engine rather than the samples: read its log ({why}), or take another rung or version",
            )
