"""The extract step: hidden states of every sample, shard by shard, each verified before it counts."""

from collections.abc import Collection, Generator
from types import TracebackType
from typing import Self

from infra.engines.client.extraction import Extractor, States
from infra.engines.client.flights import Flights
from infra.engines.client.pool import run_ordered
from infra.errors import DiskFull, ExtractionFault, GateError, StoreError
from infra.gates.capture import NextTokenProbe
from infra.progress import Meter, OnProgress
from infra.round.context import RoundContext
from infra.round.states import discard_shard, states_meta
from infra.store.hidden import ShardPlan, state_bytes_per_token
from infra.store.writer import ShardWriter


def wait_for_room(context: RoundContext, plan: ShardPlan) -> None:
    """Return when the shard, and what the engine stages for it, fits the disk budget (raises GateError)."""
    tokens = [len(context.samples[row].input_ids) for row in plan.rows]
    size = state_bytes_per_token(context.config.extract.taps, context.target.shape.hidden_size)
    staged = _staging_bytes(context, sum(tokens) // max(1, len(tokens)))
    context.disk.before(f"shard {plan.number}", store=sum(tokens) * size, scratch=staged)


def _staging_bytes(context: RoundContext, tokens: int) -> int:
    """Room for the engine's files of as many sequences of that length as are in flight, bytes."""
    size = state_bytes_per_token(context.config.extract.taps, context.target.shape.hidden_size)
    wide = 2 if context.extracting.dtype == "float32" else 1
    return wide * tokens * size * context.config.extract.concurrency


def try_sample(context: RoundContext, extractor: Extractor, flights: Flights, sample_id: str) -> None:
    """Extract one sample and forget its states: a server that it kills dies here, with nothing else in flight."""
    [sample] = [sample for sample in context.samples if sample.sample_id == sample_id]
    with flights.of(sample_id):
        extractor.extract(sample.input_ids)


class Extraction:
    """Extracts shards in order while the engine already works on the next ones.

    At most ``concurrency`` requests are in flight and about as many finished ones wait for their shard, so memory
    does not grow with the number of samples. A context manager: leaving it ends the requests.

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
        self._samples = {sample.row: sample for sample in samples}
        self._left_out = {sample.row for sample in samples if sample.sample_id in quarantined}
        rows = [row for plan in todo for row in plan.rows if row not in self._left_out]
        concurrency = context.config.extract.concurrency
        self._states: Generator[tuple[int, States | DiskFull], None, None] = run_ordered(
            rows, self._extract, concurrency, 2 * concurrency
        )
        left_out = f" ({len(self._left_out)} quarantined)" if self._left_out else ""
        self._meter = Meter(f"samples extracted{left_out}:", len(samples), len(samples) - len(rows), on_progress)
        self._probe = NextTokenProbe(context.target)
        self._made: list[ShardPlan] = []

    def shard(self, plan: ShardPlan) -> None:
        """Bring one shard to its manifest; shards must be asked for in the order of ``todo``.

        Raises:
            ExtractionFault: the engine gave something else than the states of these tokens.
            GateError: the capture gate stops; the shards made here before are deleted.
            StoreError: the shard does not verify after it was written.
        """
        context = self._round
        wait_for_room(context, plan)
        writer = ShardWriter(
            context.store, context.prefix("hidden"), plan, states_meta(context), context.config.extract.object_bytes
        )
        for expected in plan.rows:
            if expected in self._left_out:
                writer.quarantine(expected)
                continue
            row, states = next(self._states)
            if row != expected:
                raise StoreError(f"row {row} came where row {expected} was due")
            while isinstance(states, DiskFull):
                context.disk.wait(states)
                states = self._extract(row)
            self._probe.add(states)
            writer.add(row, self._samples[row].input_ids, states.hidden_states)
            self._meter.add(1, len(self._samples[row].input_ids))
        try:
            self._probe.judge()
        except GateError:
            # This server's earlier shards passed only because too few probes had been counted.
            for earlier in self._made:
                discard_shard(context, earlier)
            raise
        writer.commit()
        self._made.append(plan)

    def _extract(self, row: int) -> States | DiskFull:
        """A row's states; a fault that comes of a full disk is told, not raised, so that the other requests go on."""
        sample = self._samples[row]
        try:
            with self._flights.of(sample.sample_id):
                return self._extractor.extract(sample.input_ids)
        except ExtractionFault as error:
            if not self._round.disk.is_short(_staging_bytes(self._round, len(sample.input_ids))):
                raise
            found = f"the engine found no room for the states of row {row}: {error.what}"
            return DiskFull(found, place=self._round.settings.scratch_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._states.close()
