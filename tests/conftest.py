"""For all tiers: the lanes that share the tests, the total of each tier, and what more than one of them needs."""

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from infra.config.load import load_round, round_file
from infra.config.settings import Settings
from infra.targets.fetch import fetch_target

if TYPE_CHECKING:
    from standin.training import Trainee

# A shell starts background jobs deaf to SIGINT, and so is everything that they start; a person's terminal is not.
# Tests that interrupt a process must find the same in both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Lanes(LoadScopeScheduling):
    """With ``-n LANES``, a lane that runs out of tests takes the next module, in the order of the command line.

    The modules of a folder within a tier share servers, which only one lane should start: it takes them together.
    So does one lane take all that starts real engines, which its path says: two lanes of them want more memory than a
    small machine has.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::")[0]
        tests, tier, *folders, file = module.split("/")
        if tier != "unit" and ("vllm" in file or "engines" in module):
            return f"{tests}/engines"
        return "/".join((tests, tier, *folders)) if folders else module

    def _reschedule(self, node: Any) -> None:
        """Give a lane more as late as xdist lets it: a lane begins a test when it knows which one comes after it."""
        if self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Lanes:
    """Modules of one lane stay together, and the first ones are begun first."""
    config.option.loadscopereorder = False
    return Lanes(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what each tier took, where lanes share the tests: seconds of a lane, set-up and end included."""
    if not config.getoption("numprocesses", None):
        return
    seconds, tests = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tier = report.nodeid.split("/")[1]
                seconds[tier] += report.duration  # type: ignore[assignment]
                tests[tier] += report.when == "call"
    terminalreporter.section("tiers")
    for tier in seconds:
        terminalreporter.write_line(f"tests/{tier}: {tests[tier]} tests, {seconds[tier]:.0f} s of a lane")


@pytest.fixture(scope="session")
def api() -> Iterator[str]:
    """URL of a temporary Prefect server, one for a lane."""
    from standin.machine import prefect_server  # takes a while, and many tests do without

    yield from prefect_server()


@pytest.fixture(scope="session")
def models() -> Path:
    """Folder with SmolLM2-135M-Instruct, kept in the cache between runs of the tests."""
    cache = Settings().cache_dir
    folder = cache / "test-models"
    fetch_target(load_round(round_file("tiny")).target, folder, cache)
    return folder


@pytest.fixture(scope="session")
def trainee(tmp_path_factory: pytest.TempPathFactory) -> "Trainee":
    """A tiny target with all that the real trainer needs."""
    from standin.training import make_trainee  # torch and transformers: not for the tests without it

    return make_trainee(tmp_path_factory.mktemp("trainee"))
