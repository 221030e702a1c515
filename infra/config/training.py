"""How a draft is trained, and from where it starts."""

from typing import Literal

from pydantic import ConfigDict, Field

from infra.config.base import KNOB, LATER, Address, Strict


class TrainConfig(Strict):
    """The draft and how it is trained (speculators' EAGLE-3 trainer); docs/recipes.md has what was measured."""

    model_config = ConfigDict(serialize_by_alias=True)

    start: Address = Field(
        default="",
        alias="from",
        description="Draft to start from: a folder with a draft in speculators' format, `hf://org/draft@revision`, or "
        "`round:NAME` for what that round published in this store. It must be such a draft as this round makes, and "
        "its vocabulary is kept. Empty: start anew.",
        json_schema_extra=LATER,
    )
    epochs: int = Field(default=6, ge=1, description="Passes over the training samples.")
    learning_rate: float = Field(default=2e-3, gt=0, description="Peak learning rate.")
    optimizer: Literal["adamw", "muon"] = Field(
        default="muon",
        description="Optimizer. `muon` was better by 0.01 of acceptance length, and costs a GPU nothing. On a CPU take "
        "`adamw`: muon computes in bfloat16, which makes its step at least six times as long there.",
    )
    scheduler: Literal["linear", "cosine", "none"] = Field(default="cosine", description="Learning-rate schedule.")
    warmup: float = Field(default=0.05, ge=0, lt=1, description="Share of the steps that warm up.")
    sequence_tokens: int = Field(
        default=2048, ge=16, description="Tokens of a training pack (one step on each GPU); longer samples are cut."
    )
    draft_steps: int = Field(default=3, ge=1, le=16, description="Draft steps unrolled in training.")
    layers: int = Field(default=2, ge=1, description="Decoder layers of the draft.")
    norm_before_fc: bool = Field(
        default=False, description="Normalise the joined taps once before the projection (SGLang: from 0.5.17 on)."
    )
    norm_output: bool = Field(default=False, description="Feed the normalised state to the next draft step.")
    seed: int = Field(default=0, description="Seed of initialisation and packing order.")
    max_steps: int | None = Field(default=None, ge=1, description="Stop after so many steps; empty means all epochs.")
    checkpoints_per_epoch: int = Field(
        default=1, ge=1, description="Checkpoints to resume from, an epoch.", json_schema_extra=KNOB
    )
    silence_seconds: float = Field(
        default=3600,
        gt=0,
        description="A trainer that tells of no step, validation or checkpoint for so long hangs: it is ended and goes "
        "on from its last checkpoint, seconds.",
        json_schema_extra=KNOB,
    )
    devices: int = Field(default=1, ge=1, description="GPUs to train on (CPU rounds: 1); it decides what a step is.")
    compile: bool = Field(
        default=True,
        description="Compile the draft on CUDA (torch.compile); torch 2.11 cannot. CPU training never compiles.",
        json_schema_extra=KNOB,
    )
    extra_args: tuple[str, ...] = Field(default=(), description="Further arguments for `speculators train`.")
