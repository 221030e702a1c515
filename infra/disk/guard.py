"""The disk budget of a running round: it pauses when there is too little room, makes some, and goes on by itself."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

from infra.config.policies import BudgetConfig, RetentionConfig
from infra.config.settings import Settings
from infra.disk.candidates import candidates, free, survey
from infra.disk.item import Item
from infra.disk.room import Place, Shortage, over_budget, places, shortage
from infra.errors import DiskFull, Eagle3Error, GateError
from infra.events import Event
from infra.machine.disk import existing, file_system, is_full
from infra.machine.host import folder_bytes
from infra.machine.segments import note_segments
from infra.progress import OnProgress, Progress
from infra.store.objects import ObjectStore
from infra.units import duration, size

log = logging.getLogger(__name__)

Result = TypeVar("Result")
POLL_SECONDS = 1.0
LONGEST_POLL_SECONDS = 60.0
MEASURE_SECONDS = 30.0
"""So long the figures that take a walk through folders are good for."""
BY_HAND = 5
"""Most things that the last sentence names."""
MOST_FAILURES = 3
"""So often, long after one another, a disk may be found full that has room by every reading."""


class DiskGuard:
    """Watches the file systems of store and scratch, and ``budget.disk_bytes``, while a round runs.

    Steps ask before each piece of work (:meth:`before`); a write that finds the disk full in spite of that waits for
    room and is done again (:meth:`wait`, :meth:`through`). Both pause at most ``budget.pause_seconds``.

    Its events are ``disk.pause``, ``disk.freed``, ``disk.resume`` and ``disk.stop``.

    Attributes:
        progress: called in the round's own thread, again and again while it waits.
        notes: what the report should say of it; a pause is told by the line that ends it.

    Args:
        store: the store that holds all rounds.
        name: the round's name.
        budget: its bounds of disk and of waiting.
        retention: what may be deleted to make room.
        keys: key by step of the round as it runs now; asked for when it matters.
    """

    def __init__(
        self,
        store: ObjectStore,
        settings: Settings,
        name: str,
        *,
        budget: BudgetConfig,
        retention: RetentionConfig,
        keys: Callable[[], Mapping[str, str]],
    ) -> None:
        self._store, self._settings, self._name = store, settings, name
        self._budget, self._retention, self._keys = budget, retention, keys
        self.progress: OnProgress = lambda progress: None
        self.notes: list[str] = []
        self._next: tuple[str, dict[Place, int]] = ("the next write", {})
        self._held, self._held_at = 0, -MEASURE_SECONDS
        self._noted_at = -MEASURE_SECONDS
        self._failures, self._failed_at, self._failing_since = 0, -math.inf, 0.0

    def before(self, what: str, *, store: int = 0, scratch: int = 0) -> None:
        """Return when there is room for what comes next; pause until then.

        Args:
            what: what comes next, such as ``shard 3``.
            store: bytes that it adds to the store.
            scratch: bytes that it adds to scratch, staging included.

        Raises:
            GateError: there was none within the bound; the sentence says what could be freed by hand.
        """
        self._next = what, {"store": store, "scratch": scratch}
        if time.monotonic() - self._noted_at >= MEASURE_SECONDS:
            self._noted_at = time.monotonic()
            with suppress(OSError):  # the pid files' disk may be full; they are noted at the next look
                note_segments(self._settings.run_dir)
        if (short := self.shortage()) is not None:
            self._pause(short.text, time.monotonic(), 0.0, None)
        self._held += store + scratch

    def wait(self, error: BaseException) -> bool:
        """Return when a write that found the disk full is worth doing again: whether it was seen why it was full.

        Raises:
            GateError: as :meth:`before`.
        """
        now = time.monotonic()
        if isinstance(error, DiskFull) and error.at < self._failed_at:
            return True  # it is of the same full disk as one that was waited for
        if now - self._failed_at > 2 * LONGEST_POLL_SECONDS:
            self._failures, self._failing_since = 0, now
        # A quota or inodes may be used up while there is room by this guard's reading: then less and less often.
        at_least = min(POLL_SECONDS * 2**self._failures, LONGEST_POLL_SECONDS)
        self._failures += 1
        place = error.place if isinstance(error, DiskFull) else None
        explained = self._pause(str(error), self._failing_since, at_least, place)
        self._failed_at = time.monotonic()
        return explained

    def through(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns; it is called again after each time that it finds the disk full.

        Raises:
            GateError: as :meth:`before`; or it worked for long, found the disk full in the end, and that time and again
                though there was room by every reading.
        """
        in_vain = 0
        while True:
            begin = time.monotonic()
            try:
                return work()
            except Exception as error:
                if not is_full(error):
                    raise
                was_long = time.monotonic() - begin > 2 * LONGEST_POLL_SECONDS
                in_vain = in_vain + was_long if not self.wait(error) else 0
                if in_vain > MOST_FAILURES:
                    found = error.what if isinstance(error, Eagle3Error) else str(error)
                    why = f"{found}; by every reading there was room: is a quota, or are all inodes, used up?"
                    raise self._stop(why, None, f"in {in_vain} attempts") from error

    def is_short(self, scratch: int = 0) -> bool:
        """Whether scratch has too little room for so many bytes more, whatever else is planned."""
        return file_system(self._settings.scratch_dir).free < scratch + self._budget.free_bytes

    def shortage(self) -> Shortage | None:
        """What keeps the next piece of work from fitting, if anything does."""
        _, needs = self._next
        short = shortage(places(self._store, self._settings.scratch_dir), needs, self._budget.free_bytes)
        if short is not None or self._budget.disk_bytes is None:
            return short
        if time.monotonic() - self._held_at >= MEASURE_SECONDS:
            self._held, self._held_at = self.held_bytes(), time.monotonic()
        return over_budget(self._held, sum(needs.values()), self._budget.disk_bytes)

    def held_bytes(self) -> int:
        """Bytes that the round holds now in the store, by its present keys, and in scratch; without what it published.

        It takes a walk through the folders.
        """
        prefixes = [f"rounds/{self._name}/{step}/{key}" for step, key in self._keys().items() if step != "published"]
        stored = sum(item.size for prefix in prefixes for item in self._store.list(prefix))
        return stored + folder_bytes(self._settings.scratch_dir / self._name)

    def _pause(self, why: str, since: float, at_least: float, place: Path | None) -> bool:
        """Wait for room; whether there was a shortage to be seen, or something to be freed.

        Args:
            why: what is wrong.
            since: from when on the bound counts, ``time.monotonic()`` seconds.
            at_least: wait so long even if there seems to be room, seconds.
            place: where a write found no room, when it told.
        """
        what = self._next[0]
        begin = time.monotonic()
        self._tell("pause", f"paused before {what}: {why}")
        freed, explained = self._free(place), False
        while True:
            now, short = time.monotonic(), self.shortage()
            explained = explained or short is not None
            if short is None and (freed or now - begin >= at_least):
                break
            if now - since >= self._budget.pause_seconds:
                raise self._stop(short.text if short else why, short, f"within {duration(self._budget.pause_seconds)}")
            self.progress(Progress(0, 1, 0.0, None, f"paused: {short.text if short else why}"))
            time.sleep(POLL_SECONDS)
            self._held_at = -MEASURE_SECONDS
        self._tell("resume", f"paused {duration(time.monotonic() - begin)} before {what} for want of disk: {why}")
        return explained or freed > 0

    def _free(self, place: Path | None) -> int:
        """Delete what the policy lets go until there is room; the bytes that went."""
        freed = 0
        for item in candidates(self._store, self._settings, self._name, self._retention, self._own_states()):
            short = self.shortage()
            if short is None and freed:
                break
            if not self._helps(item, short, place):
                continue
            gone = free(self._store, self._settings, self._name, item)
            if gone is not None:
                freed += gone
                self._held_at = -MEASURE_SECONDS
                self._tell("freed", f"freed {size(item.bytes)} for want of disk: {item.path} ({item.why})")
        return freed

    def _helps(self, item: Item, short: Shortage | None, full: Path | None = None) -> bool:
        """Whether deleting it makes room where there is none.

        Where no shortage is to be seen, only a write has told: of what lies where it found no room (``full``) anything
        may help. If it did not say where, it may be any disk, and no states go for that.
        """
        if short is not None and short.device is None:
            return item.round == self._name
        if short is None and full is None:
            return item.where != "store"
        device = short.device if short is not None else existing(full).stat().st_dev if full is not None else None
        place = item.place(self._store)
        return place is not None and existing(place).stat().st_dev == device

    def _stop(self, why: str, short: Shortage | None, how_long: str) -> GateError:
        what = self._next[0]
        offers = sorted(self._by_hand(short), key=lambda item: item.bytes, reverse=True)[:BY_HAND]
        listed = "; ".join(f"{size(item.bytes)} at {self._where(item)} ({item.why})" for item in offers)
        could = f"these could be deleted by hand: {listed}" if listed else "nothing of this project's could be deleted"
        error = GateError(
            "disk",
            f"no room before {what} {how_long}: {why}",
            expected=short.needs if short else "a write that finds room",
            fix=f"make room and start the round again, it goes on where it stopped; {could}",
        )
        self._tell("stop", str(error))
        return error

    def _tell(self, what: Literal["pause", "freed", "resume", "stop"], text: str) -> None:
        Event(f"disk.{what}", f"round.{self._name}", text).tell(log)
        if what != "pause":
            self.notes.append(text)

    def _by_hand(self, short: Shortage | None) -> Iterator[Item]:
        """What can be made again and is kept only because no policy lets it go; nothing that the round works on."""
        own = self._own_states(), str(self._settings.scratch_dir / self._name)
        for item in survey(self._store, self._settings, {}):
            offered = item.bytes and (item.may_go or item.by_hand) and not item.path.startswith(own)
            if offered and (short is None or short.device is None or self._helps(item, short)):
                yield item

    def _where(self, item: Item) -> str:
        return item.path if item.where == "local" else f"{self._store.url}/{item.path}"

    def _own_states(self) -> str:
        return f"rounds/{self._name}/hidden/{self._keys()['hidden']}"
