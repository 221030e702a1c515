"""Servers that die, freeze, leak or choke on one sample in the middle of a step: what is lost, and what is said."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from standin.brain import digest
from standin.instead import instead_of_vllm
from standin.machine import Machine, new_machine

import tasks
from flows.eagle3 import eagle3
from infra.errors import EngineError, ExtractionFault, StoreError
from infra.gates.convention import capture
from infra.gates.parity import take
from infra.machine.processes.guarded import recorded
from infra.round.context import RoundContext
from infra.round.ledger import Ledger
from infra.round.rates import learnt_rates
from infra.round.serving import Serving
from infra.round.states import extracted_samples, faulty_shards, quarantined_samples
from infra.round.stored import report as stored_report
from infra.round.stored import sample_counts
from infra.round.survival import TooManyDeaths
from infra.steps.generate import answers_kept
from infra.store.answers import AnswerLog, read_answers
from infra.store.reader import StatesReader

SAMPLES = 24
QUICK = {"engines__vllm__silence_seconds": 3.0}
"""For servers that hang: soon noticed. All others are given the silence that every round gives them."""


@pytest.fixture(scope="module", autouse=True)
def _standin(api: str) -> Iterator[None]:
    """The stand-in for vLLM, and retries without their pauses."""
    with pytest.MonkeyPatch.context() as patch:
        instead_of_vllm(patch)
        yield


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A machine whose round has its samples and no states; tests work on copies of it."""
    machine = new_machine(tmp_path_factory.mktemp("prepared"))
    with pytest.MonkeyPatch.context() as patch:
        samples(machine.enter(patch).round(), Ledger())
    return machine


@pytest.fixture
def machine(prepared: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A copy in use; its journal is empty."""
    monkeypatch.setenv("STANDIN_DIED", str(tmp_path / "died"))
    return prepared.copy(tmp_path).enter(monkeypatch)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the events that are emitted."""
    seen: list[str] = []

    def keep(event: str, **_: Any) -> None:
        seen.append(event)

    monkeypatch.setattr("tasks.logs.emit_event", keep)
    return seen


@flow
def samples(context: RoundContext, ledger: Ledger) -> None:
    with Serving(context, "generate") as server, ledger.step("generate", context.keys.answers) as step:
        tasks.generate(context, server, ledger, step)
    with ledger.step("prepare", context.keys.samples) as step:
        tasks.prepare(context, step)


@flow
def states(context: RoundContext, ledger: Ledger) -> None:
    with Serving(context, "extract") as server, ledger.step("extract", context.keys.hidden) as step:
        tasks.extract(context, server, ledger, step)
    with ledger.step("verify", context.keys.hidden) as step:
        tasks.verify(context, step)


@pytest.mark.parametrize(
    ("fault", "value", "deaths", "words"),
    [
        ("STANDIN_DIE_AFTER", "9", {1}, "killed from outside"),
        ("STANDIN_FREEZE_AFTER", "9", {1}, "it answers neither /metrics nor /health; evidence: "),
        ("STANDIN_LEAK", "3", {1, 2, 3}, "killed from outside"),
    ],
)
def test_a_server_that_dies_in_the_middle_is_started_anew_and_no_state_is_lost(
    fault: str,
    value: str,
    deaths: set[int],
    words: str,
    machine: Machine,
    events: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(fault, value)
    context, ledger = machine.round(**(QUICK if fault == "STANDIN_FREEZE_AFTER" else {})), Ledger()
    states(context, ledger)

    assert faulty_shards(context, deep=True) == {}
    step = ledger.times[0]
    assert (step.reused, step.resumed, step.retried) == (False, False, False), "all of it is this run's own work"
    assert step.detail.startswith("0 of ")
    assert quarantined_samples(context) == []
    assert StatesReader(context.settings.store, context.prefix("hidden")).rows == list(range(SAMPLES))
    assert machine.launches()["extract"] - 1 in deaths
    restarts = [note for note in ledger.notes if "started anew" in note]
    assert len(restarts) == machine.launches()["extract"] - 1
    assert words in restarts[0]
    assert events.count("eagle3.server.restart") == len(restarts)
    assert events.count("eagle3.server.hang") == (fault == "STANDIN_FREEZE_AFTER")
    assert recorded(context.settings.run_dir) == []


def test_a_server_that_dies_while_it_loads_is_started_anew_by_the_next_attempt(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_DIE_LOADING", "1")
    context, ledger = machine.round(), Ledger()
    states(context, ledger)

    assert faulty_shards(context, deep=True) == {}
    assert machine.launches()["extract"] == 1, "the one that lived; the other had not come so far"
    assert ledger.notes == ["extract: attempt 2, the earlier ones failed and were taken up where they stood"]
    assert recorded(context.settings.run_dir) == []


@pytest.mark.parametrize("fault", ["STANDIN_KILLED_BY", "STANDIN_HANGS_ON"])
def test_a_sample_that_kills_servers_is_left_out_by_name(
    fault: str, machine: Machine, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context, ledger = machine.round(**(QUICK if fault == "STANDIN_HANGS_ON" else {})), Ledger()
    deadly = context.samples[7]
    monkeypatch.setenv(fault, f"{digest(deadly.input_ids):016x}")
    states(context, ledger)

    assert faulty_shards(context, deep=True) == {}
    assert quarantined_samples(context) == [deadly]
    assert [sample.row for sample in extracted_samples(context)] == [row for row in range(SAMPLES) if row != deadly.row]
    assert StatesReader(context.settings.store, context.prefix("hidden")).rows == [
        row for row in range(SAMPLES) if row != deadly.row
    ]
    assert machine.launches() == {"extract": 3}
    assert any(f"sample {deadly.sample_id} is left out" in note for note in ledger.notes)
    assert deadly.sample_id in ledger.times[-1].detail
    assert events.count("eagle3.server.quarantine") == 1

    machine.forget()
    states(machine.round(), Ledger())
    assert machine.events() == [], "what is verified without the sample is not done again"


@pytest.mark.parametrize(("fault", "words"), [("FREEZE", "hung: "), ("DIE", "killed from outside")])
def test_a_server_that_is_lost_while_it_is_measured_is_measured_again(
    fault: str, words: str, machine: Machine, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    states(machine.round(), Ledger())
    monkeypatch.setenv(f"STANDIN_{fault}_AFTER", "9")
    eagle3(machine.config(**(QUICK if fault == "FREEZE" else {})))

    report = stored_report(machine.round())
    assert report is not None
    assert machine.launches() == {"extract": 1, "bench": 2, "plain": 2}
    [lost] = [note for note in report.notes if "died while it was measured" in note]
    assert words in lost
    assert events.count("eagle3.server.hang") == (fault == "FREEZE")
    assert recorded(machine.round().settings.run_dir) == []


@pytest.mark.parametrize("ask", [capture, take])
def test_a_server_that_hangs_while_a_gate_asks_it_is_ended_and_that_is_said(
    ask: Callable[[Serving, list[list[int]]], object], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_FREEZE_AFTER", "2")
    context = machine.round(**QUICK)
    with Serving(context, "extract") as serving:
        with pytest.raises(EngineError):
            ask(serving, [sample.input_ids for sample in context.samples[:6]])
        assert serving.death(EngineError("the request failed")) is not None
    [hang] = [event.text for event in serving.events if event.name == "server.hang"]
    assert "requests in flight" in hang


def test_an_engine_that_dies_of_too_many_samples_stops_the_step(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_LEAK", "65")
    context = machine.round()
    with pytest.raises(TooManyDeaths, match="it is the engine rather than the samples"):
        states(context, Ledger())
    assert machine.launches() == {"extract": 3}, "and the step is not tried again"
    assert recorded(context.settings.run_dir) == []


@pytest.mark.parametrize("fault", ["STANDIN_OTHER_TOKENS", "STANDIN_WITHOUT_FILE"])
def test_states_that_a_living_server_gives_wrongly_are_not_asked_for_again(
    fault: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fault, "1")
    with pytest.raises(ExtractionFault):
        states(machine.round(), Ledger())
    assert machine.launches() == {"extract": 1}


@pytest.fixture
def fresh(prepared: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with the target and nothing made yet, in use."""
    monkeypatch.setenv("STANDIN_DIED", str(tmp_path / "died"))
    monkeypatch.setenv("EAGLE3_MODELS_PATH", str(prepared.folder / "state" / "models"))
    return Machine(tmp_path, prepared.fields).enter(monkeypatch)


def test_answers_kept_over_a_restart_are_this_runs_own(fresh: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_DIE_AFTER", "9")
    context, ledger = fresh.round(), Ledger()
    samples(context, ledger)

    assert fresh.launches() == {"plain": 2}
    step = ledger.times[0]
    assert (step.step, step.reused, step.resumed, step.retried, step.detail) == ("generate", False, False, False, "")
    assert len(ledger.starts) == 2
    assert ledger.restarts["generate"] == pytest.approx(ledger.starts[1])


def test_answers_of_an_attempt_that_failed_are_this_runs_own(fresh: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task fails when all answers are there and before they are said to be whole, and is tried again."""
    failures, finish = ["the store is gone for a moment"], AnswerLog.finish

    def failing(log: AnswerLog) -> None:
        if failures:
            raise StoreError(failures.pop())
        finish(log)

    monkeypatch.setattr(AnswerLog, "finish", failing)
    context, ledger = fresh.round(), Ledger()
    samples(context, ledger)

    step = ledger.times[0]
    assert (step.step, step.reused, step.resumed, step.retried, step.detail) == ("generate", False, False, True, "")


def test_answers_of_an_earlier_run_are_said_to_be(fresh: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_DIE_AFTER", "9")
    with pytest.raises(TooManyDeaths):
        samples(fresh.round(engines__vllm__max_restarts=0), Ledger())
    context, ledger = fresh.round(), Ledger()
    kept = answers_kept(context).total()
    samples(context, ledger)

    assert 0 < kept < SAMPLES
    step = ledger.times[0]
    assert (step.reused, step.resumed, step.detail) == (False, True, f"{kept} answers of an earlier run kept")
    again = Ledger()
    samples(context, again)
    assert (again.times[0].reused, again.times[0].resumed) == (True, False)


def test_rates_are_learnt_of_a_round_whose_servers_were_started_anew(
    fresh: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_DIE_AFTER", "9")
    eagle3(fresh.config())

    context = fresh.round()
    report = stored_report(context)
    assert report is not None
    assert any("started anew" in note for note in report.notes)
    assert not any(step.resumed or step.reused or step.retried for step in report.steps)
    assert learnt_rates(context) is not None


def test_a_prompt_that_kills_servers_costs_its_conversation_and_no_other(
    prepared: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Machine(tmp_path, prepared.fields).enter(monkeypatch)
    monkeypatch.setenv("EAGLE3_MODELS_PATH", str(prepared.folder / "state" / "models"))
    context, ledger = mine.round(generate__max_refused=0.2), Ledger()
    prompt = context.prompts[3]
    tokens = context.chat.render(prompt.messages, context.config.prompts.template_args, add_generation_prompt=True)
    monkeypatch.setenv("STANDIN_KILLED_BY", f"{digest(tokens):016x}")
    samples(context, ledger)

    answers = read_answers(context.store, context.prefix("answers"))
    assert len(answers) == SAMPLES
    fates = {name: answer.finish_reason for name, answer in answers.items() if answer.status == "dropped"}
    assert fates == {f"{prompt.id}#0": "quarantined", f"{prompt.id}#1": "earlier turn unanswered"}
    assert sample_counts(context)["quarantined"] == 1
    assert len(context.samples) == SAMPLES - 2
    assert mine.launches() == {"plain": 3}
    assert any(f"sample {prompt.id}#0 is left out" in note for note in ledger.notes)


def test_a_round_is_trained_and_measured_without_a_quarantined_sample(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = machine.round()
    deadly = [context.samples[5], next(sample for sample in context.samples if sample.split == "heldout")]
    monkeypatch.setenv("STANDIN_KILLED_BY", " ".join(f"{digest(sample.input_ids):016x}" for sample in deadly))
    eagle3(machine.config(extract__max_quarantined=0.1))

    report = stored_report(machine.round(extract__max_quarantined=0.1))
    assert report is not None
    assert report.training.steps == 8
    assert sum("is left out" in note for note in report.notes) == 2
    assert quarantined_samples(context) == deadly
