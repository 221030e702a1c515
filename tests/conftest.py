"""For all tiers."""

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from standin.training import Trainee

# A shell starts background jobs deaf to SIGINT, and so is everything that they start; a person's terminal is not.
# Tests that interrupt a process must find the same in both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def trainee(tmp_path_factory: pytest.TempPathFactory) -> "Trainee":
    """A tiny target with all that the real trainer needs."""
    from standin.training import make_trainee  # torch and transformers: not for the tests without it

    return make_trainee(tmp_path_factory.mktemp("trainee"))
