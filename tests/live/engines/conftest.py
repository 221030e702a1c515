"""Servers of real engines that the tests of this folder share: a start costs more than all that is asked of one.

Each is the smoke round's extracting server, and so is right for every comparison of states. They end with the folder's
last test, for each holds 3 GB.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from standin.real_engines import CHUNK, extracting, smoke

from infra.config.settings import Settings
from infra.environments.building import environment_python
from infra.errors import EnvironmentBuildError
from infra.round.serving import Serving


@pytest.fixture(scope="package")
def sglang_environment() -> Path:
    """The Python of SGLang's environment; its tests are skipped without one, as not every index has its packages."""
    try:
        return environment_python("sglang-cpu", Settings().cache_dir)
    except EnvironmentBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="package")
def vllm(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """vLLM, launched as every round launches it."""
    settings = Settings(state_dir=tmp_path_factory.mktemp("vllm"), models_path=models)
    with extracting(smoke("vllm", settings)) as serving:
        yield serving


@pytest.fixture(scope="package")
def sglang(sglang_environment: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """SGLang with small chunks, so that most prompts of the tests are worked on in pieces."""
    settings = Settings(state_dir=tmp_path_factory.mktemp("sglang"), models_path=models)
    rung = {"name": "small-chunks", "flags": ["--chunked-prefill-size", str(CHUNK)]}
    with extracting(smoke("sglang", settings, {"engines.sglang.ladder": [rung]})) as serving:
        yield serving
