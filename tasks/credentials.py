"""Credentials of the store out of a Prefect block, for workers whose environment has none."""

import os
from typing import Any, cast

from prefect.blocks.system import Secret

from infra.config.settings import Settings
from infra.errors import ConfigError

ALLOWED = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION",
    "AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION",
)  # fmt: skip


def use_store_credentials(settings: Settings) -> None:
    """Put what the block ``EAGLE3_STORE_BLOCK`` holds into this process's environment; nothing without that setting.

    The block is a ``Secret`` whose value is a mapping of AWS_* names; it is never logged.

    Raises:
        ConfigError: the block holds something else.
    """
    if not settings.store_block:
        return
    secret = cast("Secret[Any]", Secret.load(settings.store_block))
    value = secret.get()
    if not isinstance(value, dict) or not set(value) <= set(ALLOWED):
        raise ConfigError(
            f"Prefect block {settings.store_block} does not hold the store's credentials",
            expected=f"a Secret with a mapping of {', '.join(ALLOWED)}",
        )
    os.environ.update({name: str(text) for name, text in value.items()})
