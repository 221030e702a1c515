"""What an evaluation says of itself: how many requests were in flight, on how many prompts, how many drafts."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from standin.answering import AnsweringEngine
from standin.sample_report import acceptance, build, evaluation, measured
from standin.tiny import small_round, write_prompts

from infra.config.load import build_round
from infra.config.round import RoundConfig
from infra.engines.client.client import Client
from infra.engines.client.flights import Flights
from infra.engines.vllm.dialect import VllmDialect
from infra.report import markdown
from infra.report.figures import throughput_figure
from infra.results import Evaluation, Measured, Predicted
from infra.round.context import RoundContext
from infra.round.serving import Serving
from infra.steps import evaluate as steps
from infra.steps import measure as measuring
from infra.steps.measure import PromptSet, measure

PATIENCE = 20.0
DRAFTS = 2


class Crowd:
    """Answers of two tokens a step, each held back until as many requests wait as ever can; counts them by itself.

    Attributes:
        most: most requests that were open at once.
    """

    def __init__(self, engine: AnsweringEngine, proposed: int = DRAFTS) -> None:
        self.most, self.wanted = 0, 0
        self._open, self._steps, self._proposed = 0, 0, proposed
        self._changed = threading.Condition()
        self._engine = engine
        engine.stream = self.answer
        self._show()

    def expect(self, wanted: int) -> None:
        """From now on the first answers wait until so many requests are open."""
        self.wanted, self.most = wanted, 0

    def answer(self, payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._changed:
            self._open += 1
            self.most = max(self.most, self._open)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.most >= self.wanted, PATIENCE), f"{self.most} of {self.wanted}"
            self._steps += 2
            self._show()
        yield {"choices": [{"token_ids": [7], "prompt_token_ids": payload["prompt"], "finish_reason": None}]}
        yield {"choices": [{"token_ids": [8, 9], "finish_reason": None}]}
        with self._changed:
            self._open -= 1
        yield {"choices": [{"token_ids": [10, 11], "finish_reason": "length"}]}

    def _show(self) -> None:
        proposed = self._steps * self._proposed
        lines = [("drafts", self._steps), ("draft_tokens", proposed), ("accepted_tokens", self._steps)]
        page = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {count}' for name, count in lines]
        page += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{place}"}} {count}'
            for place, count in enumerate((self._steps, 0))
        ]
        self._engine.metrics = "\n".join(page) + "\n"


class Both:
    """A server without and with the draft, as far as the measurement knows one: both are the same engine here."""

    def __init__(self, config: RoundConfig, engine: AnsweringEngine) -> None:
        self.context = SimpleNamespace(config=config, versions={"vllm": "0.32.0"}, serving=config.engines["vllm"])
        self.flights, self.client = Flights(), Client(engine.url, VllmDialect())
        self.stops = 0

    def watched(self, timeout: float) -> Client:
        return self.client

    def begin(self) -> None:
        """It runs."""

    def stop(self) -> None:
        """It stays."""
        self.stops += 1

    def death(self, error: Exception) -> None:
        """It never dies."""


Judge = Callable[..., tuple[Evaluation, list[str]]]


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    """Measures prompts of these numbers at once, in this layout."""
    engine = AnsweringEngine()
    threading.Thread(target=engine.serve_forever, daemon=True).start()

    def done(how: str, heldout: int, others: int, flight: int, proposed: int = DRAFTS) -> tuple[Evaluation, list[str]]:
        fields = small_round(*write_prompts(tmp_path))
        overrides = {"evaluate.concurrencies": [flight], "evaluate.layout": how, "evaluate.heldout_count": 40}
        config = build_round(fields, overrides)
        crowd = Crowd(engine, proposed)
        sets = [
            PromptSet(name, [[first, number] for number in range(count)], 5, (flight,))
            for name, first, count in (("heldout", 1, heldout), ("evaluation", 2, others))
        ]
        servers = Both(config, engine)
        both, context = cast(Serving, servers), cast(RoundContext, servers.context)
        real = measuring._serve

        def watched(serving: Serving, client: Client, prompt_set: PromptSet, prompts: Any, concurrency: int) -> Any:
            crowd.expect(min(len(prompts), concurrency))
            found = real(serving, client, prompt_set, prompts, concurrency)
            assert crowd.most == crowd.wanted
            crowd.expect(0)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measuring, "_serve", watched)
            live = measure(context, both, both, sets, how)
        servers.client.close()
        assert servers.stops == (3 if how == "abba" else 0), "the two turns with the draft share a launch"
        predicted = Predicted(acceptance=acceptance(2.0, (1.0, 0.0)), joint=(1.0,), conditional=(1.0,))
        found = steps.judge(context, predicted, live, sets, how)
        return found, steps.shortfalls(context, found, sets)

    yield done
    engine.release.set()
    engine.shutdown()
    engine.server_close()


def facts(item: Measured) -> tuple[int | None, int | None, int]:
    """(most in flight without and with the draft, prompts)."""
    return item.plain.most_in_flight, item.draft.most_in_flight, item.acceptance.prompts


@pytest.mark.parametrize("how", ["abba", "interleaved"])
def test_as_many_requests_are_in_flight_as_the_label_says(judge: Judge, how: str) -> None:
    """Halves of 40 at 32, and of 80 at 32, would never have more than 20 and 40."""
    found, short = judge(how, heldout=40, others=80, flight=32)
    heldout, others = found.measured
    assert (heldout.concurrency, *facts(heldout)) == (32, 32, 32, 40)
    assert (others.concurrency, *facts(others)) == (32, 32, 32, 80)
    assert short == []
    assert others.acceptance.length == pytest.approx(2.0)
    assert 1 <= cast(float, others.draft.mean_in_flight) <= 32


def test_halves_stay_halves_where_they_are_enough(judge: Judge) -> None:
    found, _ = judge("abba", heldout=40, others=80, flight=8)
    assert [facts(item) for item in found.measured] == [(8, 8, 40), (8, 8, 80)]
    # Five tokens an answer; served once with the draft, once without.
    assert [item.draft.output_tokens for item in found.measured] == [5 * 40, 5 * 80]


def test_what_cannot_be_in_flight_is_said(judge: Judge) -> None:
    found, short = judge("abba", heldout=20, others=45, flight=64)
    assert [facts(item) for item in found.measured] == [(20, 20, 20), (45, 45, 45)]
    assert short[0].startswith("there are 20 held-out samples to serve, fewer than the 40 asked for")
    assert "were to be served 64 at a time; there were never more than 20 in flight" in short[1]
    result = build(evaluation=found)
    assert [row["in flight"].split(",")[0] for row in markdown.speed_table(result)] == [
        "20 of 64 asked for", "20 of 64 asked for", "45 of 64 asked for", "45 of 64 asked for",
    ]  # fmt: skip
    assert markdown.acceptance_table(result)[1]["in flight"].startswith("20 of 64 asked for, mean ")
    assert "With up to 45 requests in flight (64 were asked for) the draft" in markdown.verdict(result)
    assert throughput_figure(result) != throughput_figure(build(evaluation=asked_alone(found)))


def asked_alone(found: Evaluation) -> Evaluation:
    """The same as an old store has it: nothing was counted."""
    uncounted = {"most_in_flight": None, "mean_in_flight": None}
    return found.model_copy(
        update={
            "measured": tuple(
                item.model_copy(
                    update={
                        "plain": item.plain.model_copy(update=uncounted),
                        "draft": item.draft.model_copy(update=uncounted),
                    }
                )
                for item in found.measured
            )
        }
    )


def test_drafts_are_the_engines_count_and_not_the_rounds_wish(judge: Judge) -> None:
    found, _ = judge("interleaved", heldout=4, others=8, flight=2)
    assert "with 2 drafted at a time" in markdown.verdict(build(evaluation=found))
    found, _ = judge("interleaved", heldout=4, others=8, flight=2, proposed=1)
    assert "with 1.00 drafted (2 were asked for) at a time" in markdown.verdict(build(evaluation=found))


def test_an_old_measurement_claims_only_what_was_asked_for() -> None:
    result = build(evaluation=evaluation(measured("heldout", acceptance(1.5, (0.3, 0.2))), concurrency_of(64)))
    assert markdown.speed_table(result)[2]["in flight"] == "up to 64"
    assert "With up to 64 requests in flight" in markdown.verdict(result)


def concurrency_of(count: int) -> Measured:
    return measured("evaluation", acceptance(1.4, (0.3, 0.1)), count)


def test_latencies_of_a_late_client_are_not_passed_off_as_the_servers() -> None:
    item = measured("evaluation", acceptance(1.4, (0.3, 0.1)), 64)
    late = item.plain.model_copy(update={"client_lag": 0.6 * item.plain.between_tokens_p50})
    in_time = item.draft.model_copy(update={"client_lag": 0.1 * item.draft.between_tokens_p50})
    [said] = steps.late_client(evaluation(item.model_copy(update={"plain": late, "draft": in_time})))
    assert "at 64 in flight without the draft, the client was up to 24.7 ms late" in said
    assert steps.late_client(evaluation(item)) == []
