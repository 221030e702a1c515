"""How tokens are chosen. What a round does not name is neutral, whatever the target's own files recommend."""

from typing import Self

from pydantic import Field, model_validator

from infra.config.base import LATER, Strict


class SamplingConfig(Strict):
    """Every value of sampling that both engines know; the bounds are the narrower ones of the two."""

    temperature: float = Field(default=0.0, ge=0.0, le=2.0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus sampling bound.")
    top_k: int = Field(
        default=0,
        ge=0,
        description="Sample from so many of the likeliest tokens; 0: no bound.",
        json_schema_extra=LATER,
    )
    min_p: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Least probability of a token that is sampled, as a share of the likeliest one's; 0: no bound.",
        json_schema_extra=LATER,
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0.0,
        le=2.0,
        description="Divides the logits of tokens that prompt or answer have already; 1: none. It changes greedy "
        "answers too.",
        json_schema_extra=LATER,
    )
    presence_penalty: float = Field(
        default=0.0,
        ge=-2.0,
        le=2.0,
        description="Taken from the logits of tokens that the answer has already; 0: none.",
        json_schema_extra=LATER,
    )
    frequency_penalty: float = Field(
        default=0.0,
        ge=-2.0,
        le=2.0,
        description="Taken from a token's logit each time that the answer has it; 0: none.",
        json_schema_extra=LATER,
    )

    @model_validator(mode="after")
    def _sampled(self) -> Self:
        if self.temperature == 0 and (self.top_k or self.min_p):
            raise ValueError("top_k and min_p choose among tokens that are sampled: give a temperature above 0 too")
        return self


SAMPLING = tuple(SamplingConfig.model_fields)
"""Names of the values, as rounds, ``generation_config.json`` and the engines spell them."""
NEUTRAL: dict[str, float] = {name: field.default for name, field in SamplingConfig.model_fields.items()}
NEUTRAL["temperature"] = 1.0
"""Values at which the target's own probabilities are sampled from."""


def sampling_words(config: SamplingConfig) -> str:
    """``greedy`` or ``temperature 0.7``, and every other value that is not neutral."""
    first = f"temperature {config.temperature:g}" if config.temperature else "greedy"
    others = {name: getattr(config, name) for name in SAMPLING[1:]}
    return ", ".join([first, *(f"{name} {value:g}" for name, value in others.items() if value != NEUTRAL[name])])
