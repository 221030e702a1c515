"""The part of the lifecycle that ends with verified hidden states; shared by the flows ``eagle3`` and ``reextract``."""

import tasks
from infra.round.context import Round
from infra.round.ledger import Ledger
from infra.round.serving import Serving
from infra.round.status import RoundStatus, look


def make_answers(round_: Round, ledger: Ledger) -> None:
    """The target's answers to the round's prompts."""
    with Serving(round_, "generate") as server, ledger.step("generate", round_.keys.answers) as step:
        tasks.generate(round_, server, ledger, step)


def make_samples(round_: Round, ledger: Ledger) -> None:
    """Samples of the answers, judged by the data gate."""
    with ledger.step("prepare", round_.keys.samples) as step:
        tasks.prepare(round_, step)


def make_states(round_: Round, status: RoundStatus, ledger: Ledger) -> None:
    """Samples and their verified hidden states; the engine loads while the samples are prepared.

    Args:
        status: how far the round was when this run came to it.
    """
    with Serving(round_, "extract") as server:
        if status.parity.done and status.engine_may_load and not status.hidden.done:
            server.begin()
        make_samples(round_, ledger)
        if not look(round_).parity.done:
            with ledger.step("parity") as step:
                tasks.parity(round_, server, ledger, step)
        with ledger.step("convention", round_.keys.hidden) as step:
            tasks.convention(round_, server, ledger, step)
        with ledger.step("extract", round_.keys.hidden) as step:
            tasks.extract(round_, server, ledger, step)
    with ledger.step("verify", round_.keys.hidden) as step:
        tasks.verify(round_, step)
