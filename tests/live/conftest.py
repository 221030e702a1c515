"""The real small target, fetched once a machine."""

from pathlib import Path

import pytest

from infra.config.load import load_round, round_file
from infra.config.settings import Settings
from infra.engines.fetch import fetch_target


@pytest.fixture(scope="session")
def models() -> Path:
    """Folder with SmolLM2-135M-Instruct, kept in the cache between runs of the tests."""
    cache = Settings().cache_dir
    folder = cache / "test-models"
    fetch_target(load_round(round_file("tiny")).target, folder, cache, print)
    return folder
