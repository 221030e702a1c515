"""What is left out of a round's data: counted by kind, bounded, and told in plan and report."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from standin.machine import Machine, new_machine
from standin.sample_report import build
from standin.tiny import NAME

from infra.config.round import PromptsConfig
from infra.data.prompts import Prompt, load_prompts
from infra.data.tally import KINDS, Tally, Unusable
from infra.errors import ConfigError
from infra.report.markdown import report
from infra.steps.plan import make_plan
from infra.steps.report import left_out

TEMPLATES = Path(__file__).parents[1] / "cases" / "templates"
GOOD = [{"id": f"ok-{number}", "messages": [{"role": "user", "content": f"River {number}?"}]} for number in range(97)]
BAD = [{"prompt": None}, {"messages": [{"role": "assistant", "content": "Hi"}]}, {"prompt": ""}]


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_all_kinds_are_counted_and_named_with_examples(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", GOOD + BAD * 1)
    tally = Tally()
    assert len(load_prompts(PromptsConfig(source=source, count=97), tally=tally)) == 97
    (told,) = tally.sentences()
    assert told == (
        f"3 of 100 records of {source} are left out: 2 x has an empty `prompt` ({source}:98; {source}:100); "
        f"1 x begins with an answer ({source}:99)"
    )


def test_more_than_the_bound_stops_and_names_all_kinds_at_once(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", GOOD + BAD * 2)
    with pytest.raises(ConfigError) as caught:
        load_prompts(PromptsConfig(source=source, count=5))
    assert "6 of 103 records" in str(caught.value)
    assert "4 x has an empty `prompt`" in str(caught.value)
    assert "2 x begins with an answer" in str(caught.value)
    assert "at most 5.0%" in str(caught.value)
    assert "prompts.max_left_out" in str(caught.value)
    assert len(load_prompts(PromptsConfig(source=source, count=5, max_left_out=0.1))) == 5


def test_one_record_is_always_let_pass(tmp_path: Path) -> None:
    one, two = write(tmp_path / "p.jsonl", GOOD[:1] + BAD[:1]), write(tmp_path / "q.jsonl", GOOD[:1] + BAD[:2])
    assert len(load_prompts(PromptsConfig(source=one, count=1, max_left_out=0))) == 1
    with pytest.raises(ConfigError, match="2 of 3 records"):
        load_prompts(PromptsConfig(source=two, count=1, max_left_out=0))
    with pytest.raises(ConfigError, match=r"has 0 prompts, .* left out: 1 x has an empty `prompt`"):
        load_prompts(PromptsConfig(source=write(tmp_path / "r.jsonl", BAD[:1]), count=1))


def test_a_record_without_the_stratum_is_left_out(tmp_path: Path) -> None:
    records = [{"prompt": f"Q {n}", "kind": "ab"[n % 2]} for n in range(40)] + [{"prompt": "Q", "kind": ["a"]}]
    tally = Tally()
    source = write(tmp_path / "p.jsonl", records)
    assert len(load_prompts(PromptsConfig(source=source, count=40, stratify="kind"), tally=tally)) == 40
    assert list(tally.left_out) == ["has no field 'kind' to stratify by"]


def test_kinds_without_end_take_no_memory_without_end() -> None:
    tally = Tally("p.jsonl")
    for number in range(10 * KINDS):
        tally.leave_out(Unusable(f"kind {number}"), f"p.jsonl:{number}")
    assert len(tally.left_out) == KINDS + 1
    assert tally.left_out_count == 10 * KINDS


def test_what_a_record_holds_can_be_printed_whatever_it_is(tmp_path: Path) -> None:
    lines = ['{"prompt": "fine"}', '{"messages": [{"role": "\\ud800\\n", "content": "x"}]}', ""]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    tally = Tally()
    load_prompts(PromptsConfig(source=str(tmp_path / "p.jsonl"), count=1), tally=tally)
    (told,) = tally.sentences()
    assert "a role that is not known" in told
    assert told.encode()


def test_what_the_template_refuses_is_replaced_by_the_next(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", GOOD)
    everything = load_prompts(PromptsConfig(source=source, count=97))
    odd = {everything[3].id, everything[20].id}

    def refusal(prompt: Prompt) -> str | None:
        return "not this one" if prompt.id in odd else None

    config = PromptsConfig(source=source, count=50)
    tally = Tally()
    chosen = load_prompts(config, refusal=refusal, tally=tally)
    assert chosen == [prompt for prompt in everything if prompt.id not in odd][:50]
    assert tally.left_out["is refused by the target's template"].count == 2
    assert load_prompts(config, refusal=lambda prompt: None) == everything[:50]
    with pytest.raises(ConfigError, match=r"is refused by the target's template \(.*p\.jsonl:\d+: none at all"):
        load_prompts(config, refusal=lambda prompt: "none at all")
    with pytest.raises(ConfigError, match=r"has 95 different prompts, fewer than the 98.*2 x is refused"):
        load_prompts(PromptsConfig(source=source, count=98), refusal=refusal)


def test_who_asks_for_all_records_gets_those_that_can_be_used(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", GOOD + BAD)
    tally = Tally()
    assert len(load_prompts(PromptsConfig(source=source, count=100), tally=tally)) == 97
    assert "97 prompts are used where 100 were asked for: records are left out" in tally.sentences()
    with pytest.raises(ConfigError, match=r"has 97 different prompts, fewer than the 101 asked for; left out: "):
        load_prompts(PromptsConfig(source=source, count=101))
    kinds = [{"prompt": f"Q {n}", "kind": "ab"[n % 2]} for n in range(20)]
    kinds[3] = {"prompt": "", "kind": "b"}
    source = write(tmp_path / "q.jsonl", kinds)
    assert len(load_prompts(PromptsConfig(source=source, count=20, stratify="kind"))) == 19


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return new_machine(tmp_path).enter(monkeypatch)


def data(folder: Path) -> dict[str, Any]:
    """Sources of 40 prompts, in the one a conversation with a system message and a broken line."""
    system = [{"role": "system", "content": "Sing."}, {"role": "user", "content": "Sea?"}]
    write(folder / "train.jsonl", [*GOOD[:39], {"id": "sung", "messages": system}])
    with (folder / "train.jsonl").open("a") as stream:
        stream.write('{"prompt": \n')
    asked = [{"prompt": f"What is {number}?", "tools": [{"name": "f"}]} for number in range(4)]
    return {
        "prompts__source": str(folder / "train.jsonl"),
        "prompts__count": 39,
        "evaluate__prompts__source": write(folder / "eval.jsonl", asked),
    }


def set_template(machine: Machine, name: str) -> None:
    folder = machine.folder / "state" / "models" / NAME
    (folder / "chat_template.jinja").write_text((TEMPLATES / name).read_text())


def test_plan_and_report_tell_what_is_left_out(machine: Machine, tmp_path: Path) -> None:
    set_template(machine, "no-system.jinja")
    context = machine.round(**data(tmp_path))
    assert "sung" not in {prompt.id for prompt in context.prompts}
    notes = "\n".join(make_plan(context).notes)
    assert "prompts: 2 of 41 records" in notes
    assert "1 x is not JSON" in notes
    assert f"1 x is refused by the target's template ({tmp_path}/train.jsonl:40: no system messages)" in notes
    assert "evaluate.prompts: records of" in notes
    assert "4 x its tools" in notes

    told = left_out(context)
    assert [(item.prompts, item.used, item.count, item.read) for item in told] == [
        ("prompts", False, 1, 41),
        ("prompts", False, 1, 41),
        ("evaluate.prompts", True, 4, 4),
    ]
    text = report(build(left_out=told), {})
    assert "## Records left out" in text
    assert f"left out: is not JSON | {tmp_path}/train.jsonl:41" in text
    assert "| evaluate.prompts | 4 of 4 | used without its tools |" in text
    assert "## Records left out" not in report(build(), {})


def test_a_template_that_takes_all_leaves_nothing_out(machine: Machine, tmp_path: Path) -> None:
    context = machine.round(**data(tmp_path) | {"prompts__count": 40})
    assert "sung" in {prompt.id for prompt in context.prompts}
    assert [kind for tally in context.left_out.values() for kind in tally.left_out] == ["is not JSON"]


def test_a_template_that_refuses_every_system_message_says_so_in_plan(machine: Machine, tmp_path: Path) -> None:
    set_template(machine, "no-system.jinja")
    with pytest.raises(ConfigError, match=r"no system messages.*prompts\.system"):
        make_plan(machine.round(**data(tmp_path), prompts__system="Be brief."))


def test_a_template_that_hides_the_questions_is_refused_in_plan(machine: Machine, tmp_path: Path) -> None:
    template = machine.folder / "state" / "models" / NAME / "chat_template.jinja"
    template.write_text("{% for m in messages %}{% if m.role == 'USER' %}{{ m.content }}{% endif %}{% endfor %}Go on:")
    with pytest.raises(ConfigError, match="refused by the target's template .*it shows nothing of a question"):
        make_plan(machine.round(**data(tmp_path)))
    template.write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}Go on:")
    assert len(machine.round(**data(tmp_path)).prompts) == 39


def test_given_conversations_that_the_template_refuses_are_left_out(machine: Machine, tmp_path: Path) -> None:
    set_template(machine, "no-system.jinja")
    answer = {"role": "assistant", "content": "Yes."}
    records = [{"id": item["id"], "messages": [*item["messages"], answer]} for item in GOOD[:20]]
    twice = {"id": "twice", "messages": [*GOOD[0]["messages"], *records[1]["messages"]]}
    source = write(tmp_path / "p.jsonl", [*records, twice])
    context = machine.round(prompts__source=source, prompts__count=20, generate__answers="given")
    assert {prompt.id for prompt in context.prompts} == {item["id"] for item in records}


def test_prompts_are_chosen_anew_when_the_target_has_come(machine: Machine, tmp_path: Path) -> None:
    set_template(machine, "no-system.jinja")
    folder, away = machine.folder / "state" / "models" / NAME, tmp_path / "away"
    folder.rename(away)
    context = machine.round(**data(tmp_path), prompts__max_left_out=1.0)
    before = {prompt.id for prompt in context.prompts}
    away.rename(folder)
    assert "sung" not in {prompt.id for prompt in context.prompts}
    assert len(before) == 39


def test_memory_of_a_scan_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for lines in (1_000, 4_000):
        asked = [{"id": str(number), "prompt": f"River {number}? {'x' * 200}"} for number in range(lines)]
        config = PromptsConfig(source=write(tmp_path / f"{lines}.jsonl", [*asked, {"prompt": ""}]), count=100)
        del asked
        tracemalloc.start()
        assert len(load_prompts(config)) == 100
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 0.2 * 3_000 * 200, "a part of the further lines' text, let alone their records"
