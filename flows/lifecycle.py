"""The part of the lifecycle that ends with verified hidden states; shared by the flows ``eagle3`` and ``reextract``."""

import tasks
from infra.round.context import RoundContext
from infra.round.ledger import Ledger
from infra.round.serving import Serving
from infra.round.status import RoundStatus, look


def make_answers(context: RoundContext, ledger: Ledger) -> None:
    """The target's answers to the round's prompts."""
    with Serving(context, "generate") as server, ledger.step("generate", context.keys.answers) as step:
        tasks.generate(context, server, ledger, step)


def make_samples(context: RoundContext, ledger: Ledger) -> None:
    """Samples of the answers, judged by the data gate."""
    with ledger.step("prepare", context.keys.samples) as step:
        tasks.prepare(context, step)


def make_states(context: RoundContext, status: RoundStatus, ledger: Ledger) -> None:
    """Samples and their verified hidden states; the engine loads while the samples are prepared.

    Args:
        status: how far the round was when this run came to it.
    """
    with Serving(context, "extract") as server:
        if status.parity.done and status.engine_may_load and not status.hidden.done:
            server.begin()
        make_samples(context, ledger)
        if not look(context).parity.done:
            with ledger.step("parity") as step:
                tasks.parity(context, server, ledger, step)
        with ledger.step("convention", context.keys.hidden) as step:
            tasks.convention(context, server, ledger, step)
        with ledger.step("extract", context.keys.hidden) as step:
            tasks.extract(context, server, ledger, step)
    with ledger.step("verify", context.keys.hidden) as step:
        tasks.verify(context, step)
