"""What a round may delete, use, look at and end: none of it decides what the round computes."""

from typing import Literal

from pydantic import Field

from infra.config.base import KNOB, Strict


class RetentionConfig(Strict):
    """What may be deleted, and when."""

    states: Literal["keep", "until_published"] = Field(
        default="until_published",
        description="Hidden states of this round: kept, or deleted once its draft is trained, evaluated and published.",
    )
    earlier_rounds: bool = Field(
        default=False, description="Before training, free hidden states of other rounds whose draft is published."
    )
    stale_generations: bool = Field(
        default=True, description="Delete superseded hidden states once the new ones are verified."
    )


class BudgetConfig(Strict):
    """Bounds that the plan, and the running round, are held to."""

    disk_bytes: int | None = Field(default=None, ge=1, description="Most disk the round may use, bytes.")
    free_bytes: int = Field(
        default=2 << 30,
        ge=0,
        description="Low-water mark: room that stays free on each file system the round writes to, bytes. The round "
        "pauses before a shard or checkpoint that would not leave it.",
        json_schema_extra=KNOB,
    )
    pause_seconds: float = Field(
        default=1800.0,
        ge=0,
        description="Longest pause for want of disk; then the round stops and says what could be freed, seconds.",
        json_schema_extra=KNOB,
    )
    hours: float | None = Field(default=None, gt=0, description="Longest time the round may take, hours.")


class ParityConfig(Strict):
    """What the parity gate compares the extracting and the serving engine on, where they are two."""

    samples: int = Field(default=8, ge=1, le=256, description="Samples, and conversations to tokenise.")
    tokens: int = Field(default=2048, ge=16, description="Longest part of a sample, from its beginning, tokens.")


class ConventionConfig(Strict):
    """What the convention gate compares the captured layers with, before every extraction."""

    reference: Literal["auto", "whole", "streamed", "none"] = Field(
        default="auto",
        description="The target in transformers, the ground truth: `whole` in memory, `streamed` one decoder layer at "
        "a time, `auto` the first that fits. `none`: the layers are not checked, and the report says so.",
    )
    samples: int = Field(default=6, ge=1, le=64, description="Samples of the round to compare on.")
    tokens: int = Field(default=128, ge=8, le=4096, description="Longest part of a sample, from its beginning, tokens.")


class GatesConfig(Strict):
    """What the gates look at; none of it decides what the round computes."""

    convention: ConventionConfig = Field(default=ConventionConfig(), description="The convention gate.")
    parity: ParityConfig = Field(default=ParityConfig(), description="The parity gate.")


class GpuConfig(Strict):
    """What may be done to get GPUs free for the round; by default nobody is harmed."""

    end_own: bool = Field(
        default=True, description="End this project's own processes whose run is dead (also without any GPU)."
    )
    end_same_user: bool = Field(
        default=False,
        description="End the same user's other processes, with their process groups, on GPUs that the round lacks; "
        "for root these are all of root's, services too. Nobody is ended from within a container: the driver's process "
        "ids may be others' there.",
    )
    wait_seconds: float = Field(
        default=120.0, ge=0, description="Longest wait for memory that nobody uses to be really free, seconds."
    )
    reset: Literal["never", "if_alone"] = Field(
        default="never",
        description="`if_alone`: as root, reset GPUs that stay bad, when no process at all is on them.",
    )
    quarantine: bool = Field(
        default=True,
        description="Go on without GPUs that stay bad, if enough are left; otherwise one bad GPU stops the round.",
    )
    free: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory that must be free; no more than the engines take (vLLM's "
        "--gpu-memory-utilization, SGLang's --mem-fraction-static).",
    )
