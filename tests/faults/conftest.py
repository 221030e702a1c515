"""A Prefect server and a process that forks flows, for each module that wants them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from standin.runs import Zygote

# What is imported in the fixtures takes a while, and many tests here want neither.


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    """URL of a temporary Prefect server."""
    from standin.machine import prefect_server

    yield from prefect_server()


@pytest.fixture(scope="module")
def zygote(api: str, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Zygote]":
    """Runs flows that can be killed."""
    from standin.runs import Zygote

    started = Zygote(tmp_path_factory.mktemp("zygote"), api)
    yield started
    started.close()
