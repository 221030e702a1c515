"""What the steps leave behind for later steps and for the report."""

from pydantic import BaseModel, ConfigDict, Field


class Result(BaseModel):
    """Base of stored results."""

    # Without "constants" a NaN is written as null and the result cannot be read again.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Speed(Result):
    """Serving speed of one run, client side.

    A chunk of n tokens that arrives after a gap of g seconds counts as n gaps of g/n.
    """

    output_tokens: int
    seconds: float
    tokens_per_second: float
    first_token_p50: float = Field(description="Time to first token, median, seconds.")
    first_token_p95: float = Field(description="Time to first token, 95th percentile, seconds.")
    between_tokens_p50: float = Field(description="Time between tokens, median, seconds.")
    between_tokens_p95: float = Field(description="Time between tokens, 95th percentile, seconds.")


class Acceptance(Result):
    """Accepted drafts, counted over draft starts."""

    length: float = Field(description="Tokens a target step, bonus included; 1.0 is no speculation.")
    interval: tuple[float, float] = Field(description="95 % bootstrap interval over prompts.")
    by_position: tuple[float, ...] = Field(
        description="Share of starts whose draft at position 0, 1, ... was accepted."
    )
    starts: int
    prompts: int


class Measured(Result):
    """One live measurement: the same prompts without and with the draft."""

    prompts: str = Field(description="`heldout` (of the training kind) or `evaluation`.")
    concurrency: int
    acceptance: Acceptance
    draft: Speed
    plain: Speed
    looping: float = Field(description="Share of answers that degenerate into repetition.")


class Predicted(Result):
    """What walking the chain over held-out states predicts, and step accuracies averaged over positions."""

    acceptance: Acceptance
    joint: tuple[float, ...]
    conditional: tuple[float, ...]


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
    files: dict[str, str] = Field(description="sha256 of each file of the draft.")


class StepTime(Result):
    """One step of a run of the round."""

    step: str
    key: str
    seconds: float
    reused: bool
    detail: str = ""


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
    training: Training
    evaluation: Evaluation
    planned_disk_bytes: int
    used_disk_bytes: int
    planned_seconds: float
    used_seconds: float
    notes: tuple[str, ...] = Field(
        default=(), description="What a reader should know: fallbacks, resumed steps, freed space."
    )
