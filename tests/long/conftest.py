"""Flows that a test can kill."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from standin.runs import Zygote


@pytest.fixture(scope="session")
def zygote(api: str, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Zygote]":
    """Runs flows that can be killed; one for a lane."""
    from standin.runs import Zygote

    started = Zygote(tmp_path_factory.mktemp("zygote"), api)
    yield started
    started.close()
