"""Whole rounds through the flow, with the stand-in engine: what is done, what is not done again, what stops a round."""

import asyncio
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto.moto_server import threaded_moto_server
from prefect import flow
from prefect.client.orchestration import get_client
from standin.engine import VERSION
from standin.machine import Machine, Use, new_machine

import tasks
from flows.eagle3 import eagle3
from flows.reextract import reextract
from infra.config.load import load_round, round_file
from infra.config.settings import Settings
from infra.errors import ConfigError, Eagle3Error, GateError, PreflightError
from infra.machine.gpus.readings import GpuReport
from infra.machine.processes.guarded import recorded
from infra.round.context import RoundContext
from infra.round.states import faulty_shards
from infra.round.status import look
from infra.round.stored import report as stored_report
from infra.steps.plan import make_plan, plan_gate
from infra.steps.prepare import prepare
from infra.store.answers import read_answers

ALL_STEPS = {"answers", "samples", "hidden", "draft", "eval", "published", "report"}
SAMPLES = 24
pytestmark = pytest.mark.usefixtures("api")


async def artifact_keys() -> set[str]:
    async with get_client() as client:
        return {artifact.key for artifact in await client.read_artifacts() if artifact.key}


def test_a_round_goes_from_prompts_to_a_published_draft(finished: Machine, use: Use) -> None:
    context = use(finished).round()

    assert look(context).done == ALL_STEPS
    assert faulty_shards(context, deep=True) == {}
    report = stored_report(context)
    assert report is not None
    assert [item.step for item in report.steps] == [
        "plan", "preflight", "generate", "prepare", "convention", "extract", "verify", "cleanup", "train", "evaluate",
        "publish", "cleanup after",
    ]  # fmt: skip
    assert not any(item.reused for item in report.steps)
    assert report.versions["vllm"] == VERSION
    assert report.counts["samples"] == SAMPLES
    assert report.convention is not None
    assert report.convention.why == "gates.convention.reference is `none`"
    assert report.training.steps == 8
    assert {item.prompts for item in report.evaluation.measured} == {"heldout", "evaluation"}
    folder = context.store.local_path(report.published.removeprefix(f"{context.settings.store}/"))
    assert folder is not None
    assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in folder.iterdir()}
    assert [(item.engine, item.layer_ids, item.why_not) for item in report.layouts] == [
        ("vllm", (1, 2, 3), ""),
        ("sglang", (0, 1, 2), ""),
    ]
    beside = folder.parent / "sglang"
    assert {path.name for path in beside.iterdir()} == {"config.json", "eagle3.json", "model.safetensors", "README.md"}
    assert "not published" not in (folder / "README.md").read_text()
    assert report.others == ()
    assert {
        "plan",
        "generate",
        "convention",
        "extract",
        "train",
        "training",
        "validation",
        "draft",
        "acceptance",
        "report",
    } <= (asyncio.run(artifact_keys()))

    assert finished.launches() == {"plain": 2, "extract": 1, "bench": 1}
    assert set(finished.requests("extract").values()) == {1}
    assert len(finished.requests("extract")) == SAMPLES
    assert list(context.settings.scratch_dir.iterdir()) == []
    assert recorded(context.settings.run_dir) == []


def test_samples_that_were_there_are_judged_by_todays_bounds(again: Machine) -> None:
    counts = next((again.folder / "state" / "store").glob("rounds/small/samples/*/counts.json"))
    found = json.loads(counts.read_text())
    assert found["answers"] == SAMPLES
    counts.write_text(json.dumps(found | {"truncated": 6}))
    prepare(again.round())
    with pytest.raises(GateError, match=r"6 of 24 answers are cut at generate.max_tokens: 25\.0%"):
        prepare(again.round(generate__max_truncated=0.2))


def test_what_could_not_be_measured_is_stopped_before_anything_is_asked(again: Machine) -> None:
    trained_on = again.fields["prompts"]["source"]
    for change, said in (
        ({"evaluate.prompts.source": trained_on}, "4 of 4 evaluation prompts are training prompts too"),
        ({"evaluate.prompts.max_prompt_tokens": 2}, "none of the 4 evaluation prompts is left"),
    ):
        with pytest.raises(GateError, match=said):
            eagle3(again.config(), change)
    assert again.events() == []


def test_a_finished_round_is_not_done_again(again: Machine) -> None:
    before = again.written(*ALL_STEPS)
    torn = again.folder / "state" / "store" / "rounds" / "small" / ".put-0123456789abcdef"
    torn.write_bytes(b"half")
    os.utime(torn, (0, 0))
    eagle3(again.config())

    assert again.written(*ALL_STEPS) == before
    assert again.events() == []
    assert not torn.exists(), "what a dead writer left is swept"


def test_results_that_were_cut_are_made_again_and_stop_no_round(again: Machine) -> None:
    root = again.folder / "state" / "store"
    cut = [
        next(root.glob(pattern))
        for pattern in (
            "rounds/small/samples/*/counts.json",
            "rounds/small/samples/current.json",
            "rounds/small/hidden/current.json",
            "rounds/small/convention/*/convention.json",
            "rounds/small/report/*/report.json",
            "published/*/*/vllm/model.safetensors",
        )
    ]
    for path in cut:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (again.folder / "state" / "rates.json").write_text("{")
    assert {"samples", "published", "report"}.isdisjoint(look(again.round()).done)

    eagle3(again.config())
    assert look(again.round()).done == ALL_STEPS
    assert again.requests("complete") == again.requests("extract") == Counter()
    assert all(path.stat().st_size > 0 for path in cut)
    draft = next(root.glob("rounds/small/draft/*/model.safetensors"))
    assert cut[-1].read_bytes() == draft.read_bytes()
    draft.write_bytes(draft.read_bytes()[:-1])
    assert "draft" not in look(again.round()).done, "it is trained again rather than served"


def test_other_training_keeps_answers_and_states(again: Machine) -> None:
    before, old = again.written("answers", "samples", "hidden"), again.round().keys
    eagle3(again.config(), {"train.epochs": 1})

    now = again.round(train__epochs=1)
    assert again.written("answers", "samples", "hidden") == before
    assert again.requests("extract") == Counter()
    assert again.launches() == {"plain": 1, "bench": 1}
    assert look(now).done == ALL_STEPS
    for step in ("draft", "eval", "report"):
        assert set(now.rounds.keys(step)) == {getattr(old, step), getattr(now.keys, step)}
    report = stored_report(now)
    assert report is not None
    assert {item.step for item in report.steps if not item.reused} >= {"train", "evaluate", "publish"}
    assert "extract" not in {item.step for item in report.steps if not item.reused}


def test_a_layout_that_cannot_be_is_said_and_the_other_is_published(again: Machine) -> None:
    eagle3(again.config(), {"train.extra_args": ["--embed-requires-grad"]})

    report = stored_report(again.round(train__extra_args=["--embed-requires-grad"]))
    assert report is not None
    plain, other = report.layouts
    assert plain.published == report.published
    assert other.published == ""
    assert "embed_requires_grad" in other.why_not
    folder = Path(report.published.removeprefix("file://"))
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["vllm"]
    assert "SGLang's layout is not published: SGLang" in (folder / "README.md").read_text()


def test_another_round_of_the_target_stands_beside_it(again: Machine) -> None:
    eagle3(again.config(name="second"))

    report = stored_report(again.round(name="second"))
    first = stored_report(again.round())
    assert report is not None
    assert first is not None
    [other] = report.others
    assert other.round == "small"
    assert other.heldout == next(item.acceptance for item in first.evaluation.measured if item.prompts == "heldout")


def test_the_plan_gate_stops_before_anything_starts(again: Machine) -> None:
    with pytest.raises(GateError, match="plan gate: round small needs .* of disk, its budget is 1 B"):
        eagle3(again.config(), {"budget.disk_bytes": 1})
    assert again.events() == []


def test_a_missing_target_is_named_with_the_command_that_fetches_it(tmp_path: Path, use: Use) -> None:
    whole = new_machine(tmp_path / "whole")
    shape = {"layers": 4, "hidden_size": 64, "vocab_size": 320, "weight_bytes": 1 << 20, "family": "llama"}
    target = {"name": "standin-target", "source": "wheel://nothing==1", "shape": shape}
    bare = use(Machine(tmp_path / "bare", {**whole.fields, "target": target}))

    with pytest.raises(PreflightError, match="target standin-target is not at .*eagle3 target fetch standin-target"):
        eagle3(bare.config())
    assert bare.events() == []


def test_a_mistyped_override_is_refused_before_anything(tmp_path: Path, use: Use, finished: Machine) -> None:
    machine = use(Machine(tmp_path, finished.fields))
    with pytest.raises(ConfigError, match=r"no field train\.epoch \(did you mean train\.epochs\?\)"):
        eagle3(machine.config(), {"train.epoch": 2})
    assert list(tmp_path.iterdir()) == []


def test_round2_is_told_all_that_this_machine_lacks(
    tmp_path: Path, use: Use, finished: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Machine(tmp_path, finished.fields))
    monkeypatch.setenv("EAGLE3_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("EAGLE3_ENV_SGLANG_CUDA", raising=False)
    monkeypatch.setattr(sys.modules["tasks.preflight"], "gpus", lambda: GpuReport(False, "no NVIDIA driver", "", ()))
    context = RoundContext(load_round(round_file("round2")), Settings())

    @flow
    def only_preflight() -> None:
        tasks.preflight(context, tasks.plan(context))

    with pytest.raises(PreflightError) as caught:
        only_preflight()
    said = str(caught.value)
    assert "target Kimi-K2.5 is not at" in said
    assert "eagle3 engines install sglang-cuda" in said
    assert "sglang needs 8 GPUs and this machine has 0 (no NVIDIA driver)" in said
    assert "training wants 8 GPUs and this machine has 0" in said


def test_a_round_is_worked_on_once_at_a_time(again: Machine) -> None:
    with (
        again.round().lock(),
        pytest.raises(ConfigError, match=f"small is being worked on by process {os.getpid()}"),
    ):
        eagle3(again.config())
    eagle3(again.config())
    assert again.events() == []


def test_the_serving_gate_stops_when_serving_does_not_do_what_was_predicted(
    again: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_ACCEPTED", "2")
    change = {"evaluate.tolerance": 0.05}
    with pytest.raises(GateError, match=r"serving gate: acceptance length is [23]\.\d+ in serving, \+\d+\.\d% from"):
        eagle3(again.config(), change)

    stopped = again.round(evaluate__tolerance=0.05)
    assert again.launches() == {"plain": 1, "bench": 1}, "a gate's stop is not retried, and the draft is not redone"
    assert look(stopped).done == {"answers", "samples", "hidden", "draft"}
    assert recorded(stopped.settings.run_dir) == []


def test_the_convention_gate_stops_an_engine_whose_states_are_not_the_targets(again: Machine) -> None:
    old = again.round().keys.hidden
    change = {"gates.convention.reference": "auto", "gates.convention.samples": 3, "extract.taps": [1, 3]}
    with pytest.raises(GateError, match="convention gate: what came as tap 1 is no layer of the reference: the near"):
        eagle3(again.config(), change)

    assert again.launches() == {"extract": 1}, "a gate's stop is not retried"
    assert len(again.requests("extract")) == 3
    assert again.round().rounds.keys("hidden") == [old]
    assert "layers" in asyncio.run(artifact_keys())
    assert recorded(again.round().settings.run_dir) == []


def round_yaml(machine: Machine, name: str = "small", **fields: Any) -> str:
    path = machine.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**machine.fields, **fields, "name": name}))
    return str(path)


def test_another_engine_version_makes_a_new_generation_even_when_the_engine_dies(
    again: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = again.round().keys.hidden
    provenance = again.folder / "state" / "store" / "rounds" / "small" / "round.yaml"
    made_by = provenance.read_text()
    monkeypatch.setenv("STANDIN_VERSION", "0.33.0")
    monkeypatch.setenv("STANDIN_DIE_AFTER", "16")
    monkeypatch.setenv("STANDIN_DIED", str(tmp_path / "died"))
    now = again.round()
    hours = 1.01 * make_plan(now, ("samples", "hidden")).seconds / 3600
    with pytest.raises(GateError, match="plan gate"):
        plan_gate(again.config(budget__hours=hours), make_plan(now))  # training would not fit; it does not run here
    reextract([round_yaml(again, budget={"hours": hours})])

    assert provenance.read_text() == made_by, "it speaks of the draft that is there"
    live = now.rounds.current("hidden")
    assert (tmp_path / "died").exists()
    assert again.launches() == {"extract": 2}
    assert now.rounds.keys("hidden") == [now.keys.hidden] != [old]
    assert live is not None
    assert (live.key, live.made["engine"]) == (now.keys.hidden, "vllm 0.33.0")
    assert faulty_shards(now, deep=True) == {}
    asked = again.requests("extract")
    assert len(asked) == SAMPLES
    # The shards of the first server (rows 0 to 13 are two of them) are not asked for again.
    assert sum(count == 1 for count in asked.values()) >= SAMPLES - 10
    assert recorded(now.settings.run_dir) == []

    again.forget()
    reextract([round_yaml(again)])
    assert again.events() == []


def test_a_round_that_cannot_be_done_stops_no_other(again: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = again.folder / "state" / "store" / "rounds"
    for name in ("busy", "damaged", "deleted"):
        shutil.copytree(rounds / "small", rounds / name)
    (rounds / "damaged" / "hidden" / "current.json").write_text("{")
    deleted = again.round(name="deleted")
    deleted.store.delete_tree(deleted.prefix("hidden"))
    monkeypatch.setenv("STANDIN_VERSION", "0.33.0")
    files = [round_yaml(again, name) for name in ("busy", "damaged", "deleted", "small")]
    with (
        again.round(name="busy").lock(),
        pytest.raises(Eagle3Error, match=f"^not re-extracted: busy: round busy is .* process {os.getpid()}") as caught,
    ):
        reextract(files)

    assert "small" not in str(caught.value)
    now = again.round()
    live = now.rounds.current("hidden")
    assert live is not None
    assert live.key == now.keys.hidden
    assert again.launches() == {"extract": 1}, "what was deleted by policy is not made again for nobody"
    assert again.round(name="deleted").rounds.keys("hidden") == []


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("STANDIN_OTHER_TOKENS", r"holds states of other tokens than the \d+ that were sent"),
        ("STANDIN_WITHOUT_FILE", r"the engine did not write .*\.safetensors"),
        ("STANDIN_OTHER_NEXT", r"capture gate: .* agree with the engine's own token in 0\.0% of \d+ probes"),
    ],
)
def test_a_wrong_engine_makes_no_states_and_costs_none(
    fault: str, sentence: str, again: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, live = again.written("hidden"), again.round().rounds.current("hidden")
    monkeypatch.setenv("STANDIN_VERSION", "0.33.0")
    monkeypatch.setenv(fault, "1")
    with pytest.raises(Eagle3Error, match=f"not re-extracted: small: .*{sentence}"):
        reextract([round_yaml(again)])

    now = again.round()
    assert now.rounds.current("hidden") == live
    assert {path for path in again.written("hidden") if "manifest" in path} == {
        path for path in before if "manifest" in path
    }
    assert before.items() <= again.written("hidden").items()
    assert not (now.scratch / "staging").exists()
    assert recorded(now.settings.run_dir) == []


def test_a_round_whose_store_is_a_bucket(tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = use(new_machine(tmp_path))
    server = threaded_moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "hush-hush",
            "AWS_DEFAULT_REGION": "us-east-1",
            "EAGLE3_STORE_URL": "s3://rounds/here",
        }.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="rounds")
        eagle3(machine.config())

        context = machine.round()
        report = stored_report(context)
        assert look(context).done == ALL_STEPS
        assert report is not None
        assert report.published.startswith("s3://rounds/here/published/")
        assert len(read_answers(context.store, context.prefix("answers"))) == SAMPLES
        assert faulty_shards(context, deep=True) == {}
        assert not (tmp_path / "state" / "store").exists()
        assert _secrets_written(tmp_path) == []

        machine.forget()
        eagle3(machine.config())
        assert machine.events() == []
    finally:
        server.stop()


def _secrets_written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and b"hush-hush" in path.read_bytes()]
