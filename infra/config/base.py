"""What every config type is made of."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

KNOB: dict[str, Any] = {"knob": True}
"""For ``json_schema_extra``: the field changes how fast a step runs, never what it computes."""
LATER: dict[str, Any] = {"later": True}
"""For ``json_schema_extra``: the field is younger than rounds that are done; at its default, which is what they did, it
is in no step's key."""

URL_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]+@")
"""A name and password inside a URL."""


def without_password(text: str) -> str:
    """The text, unless it is a URL with a password in it: rounds and addresses are stored, logged and shown.

    Raises:
        ValueError: it is; the text is not repeated.
    """
    if URL_PASSWORD.search(text):
        raise ValueError("a URL with a password in it is not taken; give credentials by the environment (AWS_* ...)")
    return text


Address = Annotated[str, AfterValidator(without_password)]
"""A path or URL, free of secrets."""


class Strict(BaseModel):
    """Base of every config type: unknown keys, NaN and infinity are refused, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
