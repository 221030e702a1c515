"""What the steps leave behind for later steps and for the report."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

TRAINING = "training.json"
"""The train step's result; stored last, it makes the draft whole."""
REPORT = "report.json"
"""The report step's result."""


class Result(BaseModel):
    """Base of stored results."""

    # Without "constants" a NaN is written as null and the result cannot be read again.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Speed(Result):
    """Serving speed of one or more runs, client side; rates and times are those of the steady state.

    A chunk of n tokens that arrives after a gap of g seconds counts as n gaps of g/n.
    """

    output_tokens: int
    seconds: float
    tokens_per_second: float
    first_token_p50: float = Field(description="Time to first token, median, seconds.")
    first_token_p95: float = Field(description="Time to first token, 95th percentile, seconds.")
    between_tokens_p50: float = Field(description="Time between tokens, median, seconds.")
    between_tokens_p95: float = Field(description="Time between tokens, 95th percentile, seconds.")
    most_in_flight: int | None = Field(
        default=None, description="Most requests in flight at one moment; None: it was not counted."
    )
    mean_in_flight: float | None = Field(default=None, description="Requests in flight, mean over the time.")
    between_tokens_p99: float | None = Field(
        default=None, description="Time between tokens, 99th percentile, seconds; None: it was not kept."
    )
    steady_seconds: float | None = Field(
        default=None,
        description="Seconds without ramp-up and drain, all runs; 0: a run had none, and all is counted; None: an old "
        "measurement, which counts all.",
    )
    runs: int | None = Field(default=None, description="Repeated runs; None: it was not kept.")
    interval: tuple[float, float] | None = Field(
        default=None, description="95 % interval of tokens_per_second over the runs; None: there were too few."
    )
    client_lag: float | None = Field(
        default=None,
        description="How late the client was to stamp what came, seconds, 95th percentile; None: not noted.",
    )


class Acceptance(Result):
    """Accepted drafts, counted over draft starts."""

    length: float = Field(description="Tokens a target step, bonus included; 1.0 is no speculation.")
    interval: tuple[float, float] = Field(description="95 % bootstrap interval over prompts.")
    by_position: tuple[float, ...] = Field(
        description="Share of starts whose draft at position 0, 1, ... was accepted."
    )
    starts: int
    prompts: int
    drafted: float | None = Field(default=None, description="Tokens proposed a start, mean; None: it was not counted.")


class Measured(Result):
    """One live measurement: the same prompts without and with the draft."""

    prompts: str = Field(description="`heldout` (of the training kind) or `evaluation`.")
    concurrency: int = Field(description="Requests in flight that were asked for; `draft` and `plain` have the fact.")
    acceptance: Acceptance
    draft: Speed
    plain: Speed
    looping: float = Field(description="Share of answers that degenerate into repetition.")
    speed_up: tuple[float, float] | None = Field(
        default=None, description="95 % interval of the speed-up over paired runs; None: there were too few."
    )


class Predicted(Result):
    """What walking the chain over held-out states predicts, and step accuracies averaged over positions."""

    acceptance: Acceptance
    joint: tuple[float, ...]
    conditional: tuple[float, ...]


class Paired(Result):
    """Served steps beside the walk's prediction for them, where a served answer has the stored one's tokens.

    Intervals are 95 % bootstrap intervals over prompts.
    """

    prompts: int = Field(description="Prompts with a step that is compared.")
    steps: int = Field(description="Steps that are compared.")
    active: int = Field(description="Of these, steps where the walk, or serving, has a draft accepted.")
    stored_tokens: int = Field(description="Tokens of the stored answers.")
    shared_tokens: int = Field(description="Of these, tokens before the served answer parts from the stored one.")
    differing: float = Field(description="Share of the active steps that got another number of drafts accepted.")
    differing_interval: tuple[float, float]
    difference: float = Field(description="Accepted drafts a compared step, served minus predicted, mean.")
    difference_interval: tuple[float, float]
    same: float = Field(description="Share of the compared steps that got exactly what was predicted.")
    bound: float = Field(description="The gate stops when the whole interval of `differing` is above it.")
    pieces: int = Field(description="Pieces of the streams after their first ones; each is a step.")
    counted: int = Field(description="Steps with drafts that the engine counted over the same answers.")
    why_not: str = Field(default="", description="Why the steps decide nothing; empty when they decide.")

    @property
    def shared(self) -> float:
        """Share of the stored answers' tokens that the served ones have, too."""
        return self.shared_tokens / self.stored_tokens if self.stored_tokens else 0.0


class Evaluation(Result):
    """The evaluate step's result."""

    engine: str
    engine_version: str
    drafts: int
    layout: str = Field(description="`interleaved` or `abba`: how the two servers shared the machine.")
    predicted: Predicted
    measured: tuple[Measured, ...]
    deviation: float = Field(description="Live over predicted acceptance length on the same held-out prompts, minus 1.")
    tolerance: float = Field(default=0.05, description="The round's bound on the deviation's size, relative.")
    paired: Paired | None = Field(
        default=None, description="The same step by step, which decides where it can; None: it was not compared."
    )


class TrainPoint(Result):
    """Training metrics at one logged step."""

    step: int
    loss: float
    accuracy: tuple[float, ...] = Field(description="Joint accuracy at draft steps 0, 1, ...")


class Training(Result):
    """The train step's result."""

    steps: int
    epochs: int
    seconds: float
    tokens: int
    resumed: int = Field(description="How often training was taken up again after an interruption.")
    history: tuple[TrainPoint, ...]
    validation: tuple[TrainPoint, ...]
    trainer_version: str
    draft_vocab_size: int
    coverage: float | None = Field(
        default=None,
        description="Share of the supervised training tokens that the draft can propose; None: it was not noted.",
    )
    start: str = Field(default="", description="The draft that it started from, with its hash; empty: it began anew.")
    files: dict[str, str] = Field(description="sha256 of each file of the draft.")
    sizes: dict[str, int] = Field(default={}, description="Bytes of each of them.")


class Convention(Result):
    """The convention gate's measurement: which layers the extracting engine really captured."""

    engine: str = Field(description="Engine and version.")
    taps: tuple[int, ...] = Field(description="What each slot of the states was asked to be: taps ascending, L last.")
    reference: str = Field(default="", description="How the reference computed; empty: there was none.")
    why: str = Field(default="", description="Why there was no reference.")
    prompts: int = 0
    tokens: int = 0
    medians: tuple[tuple[float, ...], ...] = Field(
        default=(),
        description="For each slot its median error over the tokens, relative, against each tap 0 to L of the "
        "reference; the last slot post-norm.",
    )
    ratios: tuple[float, ...] = Field(
        default=(), description="For each slot its error at its own tap over that at the nearer neighbour; bound 0.2."
    )
    argmax_agreed: int = Field(default=0, description="Positions where the final state leads to the reference's token.")
    argmax_counted: int = Field(default=0, description="Positions compared, near-ties left out.")
    own_agreed: int = Field(default=0, description="Prompts whose final state leads to the engine's own next token.")
    own_counted: int = Field(default=0, description="Prompts compared, near-ties left out.")
    near_ties: int = Field(default=0, description="Positions left out.")
    fault: str = Field(default="", description="What is wrong; empty when every slot is the tap it was asked to be.")
    remedy: str = Field(default="", description="What to do about it.")

    @property
    def layers(self) -> int:
        """Number of decoder layers L."""
        return self.taps[-1]


class TapParity(Result):
    """How far two engines are apart at one tap, over the tokens of all sequences.

    Errors are relative, by token: the norm of the difference over the norm of the first engine's state.
    """

    tap: int = Field(description="Tap k, or L for the final state, compared after the target's norm.")
    median: float
    p99: float = Field(description="99th percentile.")
    worst: float
    worst_at: str = Field(description="The token with the worst error: sequence, position, id.")
    bound: float = Field(description="Most that the median may be.")
    neighbour: float | None = Field(
        default=None, description="Median distance to the nearer neighbouring layer in the reference; None: not known."
    )
    by_position: tuple[float, ...] = Field(description="Median error in equal stretches of positions.")
    cause: Literal["offset", "order", "norm", ""] = Field(
        default="",
        description="What a state beyond its bound was recognised as: another layer, slot, or side of the norm.",
    )
    seen: str = Field(default="", description="The same in words.")


class Parity(Result):
    """The parity gate's comparison of the engine that extracts with the engine that serves."""

    extracting: str = Field(description="Engine and version.")
    serving: str = Field(description="Engine and version.")
    layers: int = Field(description="Number of decoder layers L.")
    sequences: int
    tokens: int
    stretch: int = Field(description="Positions in one stretch of `by_position`.")
    reference: bool = Field(description="Whether the bounds are shares of the distances between the target's layers.")
    taps: tuple[TapParity, ...] = Field(description="The round's taps ascending, the final state last.")
    argmax: float = Field(description="Share of positions at which the final states lead to the same token.")
    argmax_counted: int = Field(description="Positions counted, near-ties left out.")
    near_ties: int
    conversations: int = Field(description="Conversations that both engines were asked to tokenise.")
    tokeniser_fault: str = Field(
        default="", description="Where an engine and the target's template part; empty: nowhere."
    )


class Layout(Result):
    """The published draft in one engine's layout, or why it is not there."""

    engine: str
    published: str = Field(default="", description="Its folder, URL; empty when it is not published.")
    layer_ids: tuple[int, ...] = Field(default=(), description="The taps as the engine numbers them.")
    made_for: str = Field(default="", description="Engine version of the ids; empty: any that reads the layout.")
    holds_for: str = Field(default="", description="Engine versions that are known to number so.")
    why_not: str = Field(default="", description="One sentence; empty when it is published.")


class OtherRound(Result):
    """Live acceptance of another round of the same target, as its report says."""

    round: str
    states_from: str = Field(description="Engine and version.")
    served_by: str = Field(description="Engine and version.")
    drafts: int
    heldout: Acceptance | None
    evaluation: Acceptance | None


class LeftOut(Result):
    """Records of one kind that were not used, or not with all that they carry."""

    prompts: str = Field(description="`prompts` or `evaluate.prompts`.")
    kind: str = Field(description="Why, or what of them was not used.")
    used: bool = Field(description="Whether they were used all the same.")
    count: int
    read: int = Field(description="Records read in all.")
    examples: tuple[str, ...] = Field(description="Where the first of them lie.")


class StepTime(Result):
    """One step of a run of the round."""

    step: str
    key: str
    seconds: float
    reused: bool
    detail: str = ""
    resumed: bool = Field(default=False, description="Some of its work was there when this run came to it.")
    retried: bool = Field(default=False, description="Its task failed and was tried again; `seconds` has it all.")


class Report(Result):
    """The whole round, as report.json holds it."""

    round: str
    description: str
    target: str
    target_revision: str
    draft: str = Field(description="Name of the published draft.")
    published: str = Field(description="Where the draft lies, URL.")
    taps: tuple[int, ...]
    engine: str
    engine_version: str
    versions: dict[str, str]
    steps: tuple[StepTime, ...]
    counts: dict[str, int] = Field(
        description="Samples, tokens, and what was truncated, empty, refused, cut, dropped, retried."
    )
    sampling: dict[str, str] = Field(
        default={}, description="How the answers and the measured ones were sampled, in words; empty: not noted."
    )
    training: Training
    evaluation: Evaluation
    convention: Convention | None = Field(
        default=None, description="What the convention gate measured; None: these states were made without it."
    )
    parity: Parity | None = Field(
        default=None, description="The parity gate's comparison, where another engine serves than extracted."
    )
    layouts: tuple[Layout, ...] = Field(default=(), description="The published draft, by engine.")
    others: tuple[OtherRound, ...] = Field(default=(), description="Other rounds of this target, by name.")
    left_out: tuple[LeftOut, ...] = Field(default=(), description="Records of the data that were not used, by kind.")
    planned_disk_bytes: int
    used_disk_bytes: int
    planned_seconds: float
    used_seconds: float
    notes: tuple[str, ...] = Field(
        default=(), description="What a reader should know: fallbacks, resumed steps, freed space."
    )

    def live(self, prompts: str) -> Measured | None:
        """The live measurement on one kind of prompts at the fewest requests in flight, if there is one."""
        measured = [item for item in self.evaluation.measured if item.prompts == prompts]
        return min(measured, key=lambda item: item.concurrency, default=None)

    def in_brief(self, name: str = "") -> OtherRound:
        """As other rounds of the target show this one; ``name`` replaces the round's."""
        heldout, evaluation = self.live("heldout"), self.live("evaluation")
        return OtherRound(
            round=name or self.round,
            states_from=f"{self.engine} {self.engine_version}",
            served_by=f"{self.evaluation.engine} {self.evaluation.engine_version}",
            drafts=self.evaluation.drafts,
            heldout=heldout.acceptance if heldout is not None else None,
            evaluation=evaluation.acceptance if evaluation is not None else None,
        )
