"""The extract step: hidden states of every sample, shard by shard, each verified before it counts."""

from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Self

import torch

from infra.engines.client.extraction import Extractor
from infra.engines.client.flights import Flights
from infra.engines.client.pool import Room, run_ordered
from infra.errors import DiskFull, ExtractionFault, GateError, StoreError
from infra.gates.capture import Ending, NextTokenProbe
from infra.progress import Meter, OnProgress
from infra.round.context import RoundContext
from infra.round.needs import WINDOW_BYTES
from infra.round.states import discard_shard, states_meta
from infra.store.hidden import ShardPlan, state_bytes_per_token
from infra.store.writer import RowRoom, ShardWriter


def wait_for_room(context: RoundContext, plan: ShardPlan) -> None:
    """Return when the shard, and what the engine stages for it, fits the disk budget (raises GateError)."""
    tokens = context.samples.token_counts[plan.first_row : plan.end_row].tolist()
    size = state_bytes_per_token(context.config.extract.taps, context.target.shape.hidden_size)
    staged = _staging_bytes(context, sum(tokens) // max(1, len(tokens)))
    context.disk.before(f"shard {plan.number}", store=sum(tokens) * size, scratch=staged)


def _staging_bytes(context: RoundContext, tokens: int) -> int:
    """Room for the engine's files of as many sequences of that length as are in flight, bytes."""
    size = state_bytes_per_token(context.config.extract.taps, context.target.shape.hidden_size)
    wide = 2 if context.extracting.dtype == "float32" else 1
    return wide * min(tokens * size * context.config.extract.concurrency, max(WINDOW_BYTES, tokens * size))


def try_sample(context: RoundContext, extractor: Extractor, flights: Flights, sample_id: str) -> None:
    """Extract one sample and forget its states: a server that it kills dies here, with nothing else in flight."""
    [sample] = [sample for sample in context.samples if sample.sample_id == sample_id]
    with flights.of(sample_id):
        extractor.extract(sample.input_ids)


class Extraction:
    """Extracts shards in order while the engine already works on the next ones.

    Each request's thread writes the states that it got into their shard, so none wait in memory. At most
    ``concurrency`` requests, and ``WINDOW_BYTES`` of states, are in flight. A context manager: leaving it ends the
    requests.

    Args:
        extractor: the states' source.
        flights: where its requests are told.
        todo: the shards to do, ascending.
        quarantined: ids of samples to be left out.
    """

    def __init__(
        self,
        context: RoundContext,
        extractor: Extractor,
        flights: Flights,
        todo: list[ShardPlan],
        quarantined: Collection[str] = (),
        on_progress: OnProgress | None = None,
    ) -> None:
        self._round, self._extractor, self._flights = context, extractor, flights
        samples = context.samples
        self._samples = samples
        self._left_out = {sample.row for sample in samples if sample.sample_id in quarantined} if quarantined else set()
        self._todo, self._made = list(todo), list[ShardPlan]()
        self._writers: dict[int, ShardWriter] = {}
        self._token_bytes = state_bytes_per_token(context.config.extract.taps, context.target.shape.hidden_size)
        self._window = Room(WINDOW_BYTES)
        rows = sum(row not in self._left_out for plan in todo for row in plan.rows)
        concurrency = context.config.extract.concurrency
        self._landed = run_ordered(self._rows(), self._bring, concurrency, 2 * concurrency)
        left_out = f" ({len(self._left_out)} quarantined)" if self._left_out else ""
        self._meter = Meter(f"samples extracted{left_out}:", len(samples), len(samples) - rows, on_progress)
        self._probe = NextTokenProbe(context.target)
        self._torch_threads = torch.get_num_threads()

    def shard(self, plan: ShardPlan) -> None:
        """Bring one shard to its manifest; shards must be asked for in the order of ``todo``.

        Raises:
            ExtractionFault: the engine gave something else than the states of these tokens.
            GateError: the capture gate stops; the shards made here before are deleted.
            StoreError: the shard does not verify after it was written.
        """
        context = self._round
        for expected in plan.rows:
            (row, room), ending = next(self._landed)
            if row != expected:
                raise StoreError(f"row {row} came where row {expected} was due")
            while isinstance(ending, DiskFull):
                context.disk.wait(ending)
                ending = self._bring((row, room))
            if ending is not None:
                self._probe.add(ending, first_of_shard=row == plan.first_row)
                self._meter.add(1, int(self._samples.token_counts[row]))
        try:
            self._probe.judge(whole=plan == self._todo[-1])
        except GateError:
            # This server's earlier shards passed only because too few probes had been counted.
            for earlier in self._made:
                discard_shard(context, earlier)
            raise
        self._writers.pop(plan.number).commit()
        self._made.append(plan)

    def _rows(self) -> Iterator[tuple[int, RowRoom | None]]:
        """Every row and its place, None for one that is left out; the round's own thread asks, and may wait here."""
        for plan in self._todo:
            writer = self._writers[plan.number] = self._begin(plan)
            for row in plan.rows:
                if row in self._left_out:
                    writer.quarantine(row)
                    yield row, None
                else:
                    yield row, writer.reserve(row, self._samples.token_ids(row))

    def _begin(self, plan: ShardPlan) -> ShardWriter:
        context = self._round
        wait_for_room(context, plan)
        counts = self._samples.token_counts
        tokens = sum(int(counts[row]) for row in plan.rows if row not in self._left_out)
        most = min(context.config.extract.object_bytes, tokens * self._token_bytes)
        return ShardWriter(context.store, context.prefix("hidden"), plan, states_meta(context), most)

    def _bring(self, place: tuple[int, RowRoom | None]) -> Ending | DiskFull | None:
        """Extract a row's states into their place; None for a row that is left out.

        What comes of a full disk is told, not raised, so that the other requests go on.
        """
        row, room = place
        if room is None:
            return None
        sample = self._round.samples[row]
        with self._window.of(len(sample.input_ids) * self._token_bytes):
            try:
                with self._flights.of(sample.sample_id):
                    states = self._extractor.extract(sample.input_ids)
            except ExtractionFault as error:
                if not self._round.disk.is_short(_staging_bytes(self._round, len(sample.input_ids))):
                    raise
                found = f"the engine found no room for the states of row {row}: {error.what}"
                return DiskFull(found, place=self._round.settings.scratch_dir)
            try:
                room.fill(states.hidden_states)
            except DiskFull as full:
                return full
            return Ending(states.hidden_states[-1, -1].clone(), states.next_token)

    def __enter__(self) -> Self:
        # Each request's thread that touches torch would get as many more of torch's own.
        torch.set_num_threads(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_num_threads(self._torch_threads)
        self._landed.close()
        self._probe.close()
        for writer in self._writers.values():
            writer.discard()
