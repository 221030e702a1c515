"""What every config type is made of."""

from typing import Any

from pydantic import BaseModel, ConfigDict

KNOB: dict[str, Any] = {"knob": True}
"""For ``json_schema_extra``: the field changes how fast a step runs, never what it computes."""


class Strict(BaseModel):
    """Base of every config type: unknown keys are refused, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)
