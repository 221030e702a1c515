"""The lines that faults of engines are known by are the installed engines' own."""

from pathlib import Path

import pytest
from standin.wordings import WORDINGS, Wording

from infra.config.settings import Settings
from infra.environments.building import environment_python
from infra.errors import EnvironmentBuildError


@pytest.mark.parametrize("wording", WORDINGS, ids=lambda wording: wording.words)
def test_the_engine_has_these_words(wording: Wording) -> None:
    try:
        python = environment_python(f"{wording.engine}-cpu", Settings().cache_dir)
    except EnvironmentBuildError as error:
        pytest.skip(str(error))
    [packages] = python.parent.parent.glob("lib/python3*/site-packages")
    assert wording.words in Path(packages, wording.module).read_text()
    assert wording.words in wording.line
