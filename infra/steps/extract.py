"""The extract step: hidden states of every sample, shard by shard, each verified before it counts."""

from collections.abc import Generator
from types import TracebackType
from typing import Self

from infra.engines.extraction import Extractor, States
from infra.engines.pool import run_ordered
from infra.errors import GateError, StoreError
from infra.steps.capture import NextTokenProbe
from infra.steps.context import Round
from infra.steps.progress import Meter, OnProgress
from infra.store.hidden import ShardPlan, ShardWriter, plan_shards, state_bytes_per_token, verify_shard
from infra.store.hidden import discard_shard as discard
from infra.store.manifest import StatesMeta


def states_meta(round_: Round) -> StatesMeta:
    """What every manifest of this round's states must say."""
    engine = round_.config.extract.engine
    return StatesMeta(
        taps=round_.config.extract.taps,
        final="pre_norm" if engine == "vllm" else "unit_rms",
        dtype="bf16",
        hidden_size=round_.target.shape.hidden_size,
        engine=engine,
        engine_version=round_.versions[engine],
        target_revision=round_.target.revision,
    )


def shards_of(round_: Round) -> list[ShardPlan]:
    """The shards that hold the round's samples."""
    config = round_.config.extract
    size = state_bytes_per_token(config.taps, round_.target.shape.hidden_size)
    return plan_shards([len(sample.input_ids) for sample in round_.samples], size, config.shard_bytes)


def faulty_shards(round_: Round, deep: bool) -> dict[ShardPlan, str]:
    """The shards that are not there or do not verify, ascending, each with its fault; changes nothing.

    Args:
        deep: read every object and compare its checksum, too.
    """
    tokens = {sample.row: sample.input_ids for sample in round_.samples}
    faults = {}
    for plan in shards_of(round_):
        fault = verify_shard(round_.store, round_.prefix("hidden"), plan, states_meta(round_), tokens, deep=deep)
        if fault is not None:
            faults[plan] = str(fault)
    return faults


def generation(round_: Round) -> dict[str, object]:
    """What the pointer to a verified generation of hidden states says of it."""
    engine = round_.config.extract.engine
    return {
        "samples": round_.keys.samples,
        "target_revision": round_.target.revision,
        "engine": f"{engine} {round_.versions[engine]}",
        "taps": list(round_.config.extract.taps),
    }


def make_live(round_: Round) -> None:
    """Point to this generation, which was verified; the others that are there now are superseded by it."""
    key = round_.keys.hidden
    others = [other for other in round_.rounds.keys("hidden") if other != key]
    round_.rounds.point("hidden", key, {**generation(round_), "supersedes": others})


def discard_shard(round_: Round, plan: ShardPlan) -> int:
    """Delete what is left of a shard that does not verify, so that it can be done again; returns bytes freed."""
    return discard(round_.store, round_.prefix("hidden"), plan)


class Extraction:
    """Extracts shards in order while the engine already works on the next ones.

    At most ``concurrency`` requests are in flight and about as many finished ones wait for their shard, so memory
    does not grow with the number of samples. A context manager: leaving it ends the requests.

    Args:
        todo: the shards to do, ascending.
    """

    def __init__(
        self,
        round_: Round,
        extractor: Extractor,
        todo: list[ShardPlan],
        on_progress: OnProgress | None = None,
    ) -> None:
        self._round, self._extractor = round_, extractor
        samples = round_.samples
        self._samples = {sample.row: sample for sample in samples}
        rows = [row for plan in todo for row in range(plan.first_row, plan.end_row)]
        concurrency = round_.config.extract.concurrency
        self._states: Generator[tuple[int, States], None, None] = run_ordered(
            rows, lambda row: extractor.extract(self._samples[row].input_ids), concurrency, 2 * concurrency
        )
        self._meter = Meter("samples extracted:", len(samples), len(samples) - len(rows), on_progress)
        self._probe = NextTokenProbe(round_.target)
        self._made: list[ShardPlan] = []

    def shard(self, plan: ShardPlan) -> None:
        """Bring one shard to its manifest; shards must be asked for in the order of ``todo``.

        Raises:
            ExtractionFault: the engine gave something else than the states of these tokens.
            GateError: the capture gate stops; the shards made here before are deleted.
            StoreError: the shard does not verify after it was written.
        """
        round_ = self._round
        writer = ShardWriter(
            round_.store, round_.prefix("hidden"), plan, states_meta(round_), round_.config.extract.object_bytes
        )
        for expected in range(plan.first_row, plan.end_row):
            row, states = next(self._states)
            if row != expected:
                raise StoreError(f"row {row} came where row {expected} was due")
            self._probe.add(states)
            writer.add(row, self._samples[row].input_ids, states.hidden_states)
            self._meter.add(1, len(self._samples[row].input_ids))
        try:
            self._probe.judge()
        except GateError:
            # This server's earlier shards passed only because too few probes had been counted.
            for earlier in self._made:
                discard_shard(round_, earlier)
            raise
        writer.commit()
        self._made.append(plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._states.close()
