"""The real small target, and a state folder for each module's servers."""

from pathlib import Path

import pytest

from infra.config.round import TargetConfig
from infra.config.settings import Settings
from infra.targets.target import Target, open_target


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Settings:
    return Settings(state_dir=tmp_path_factory.mktemp("state"), models_path=models)


@pytest.fixture(scope="module")
def target(settings: Settings) -> Target:
    return open_target(TargetConfig(name="SmolLM2-135M-Instruct"), settings.models_dir)
