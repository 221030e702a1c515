"""A store that an earlier version of the code left behind is read, gone on with and reported again.

``cases/golden_store/state.tar.xz`` holds the store of a finished round (4 conversations, the stand-in engine) as commit
275e3df wrote it, and the target's files but its weights, which :func:`standin.tiny.tiny_target` makes. Beside it lie
the round's fields, its prompts and the keys that the commit gave its steps. The fields also name what that commit took
for a learning rate and for layers, since the defaults differ.
"""

import hashlib
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from standin.machine import Machine, Use
from standin.tiny import NAME, tiny_target

from deployments.cli import round as round_command
from flows.eagle3 import eagle3
from infra.config.load import build_round
from infra.config.settings import Settings
from infra.data.history import CUT
from infra.results import Report
from infra.round.context import RoundContext
from infra.round.states import faulty_shards
from infra.round.status import look
from infra.round.stored import report as stored_report
from infra.round.stored import sample_counts
from infra.steps.prepare import prepare

GOLDEN = Path(__file__).parents[1] / "cases" / "golden_store"
KEYS = json.loads((GOLDEN / "keys.json").read_text())
VERSIONS = {"vllm": "0-standin", "speculators": "0.9.0"}
"""Engine and trainer that made the store. They enter the keys, and what is installed moves on."""
SAMPLES = 8
LOOKED_AT_AGAIN = "rounds/small/samples/17ad88875ba2/histories.json"
"""What is noted of samples in which the round's histories were never compared."""
PROVENANCE = "rounds/small/round.yaml"
"""Names the code's commit and the prompts' files, so that every start of the round writes it."""
pytestmark = pytest.mark.usefixtures("api")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was found of target and trainer before, so that it is looked for once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def golden(use: Use, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with the golden store, in use."""
    monkeypatch.setattr(RoundContext, "versions", VERSIONS)
    fields = json.loads((GOLDEN / "fields.json").read_text())
    for prompts in (fields["prompts"], fields["evaluate"]["prompts"]):
        prompts["source"] = str(GOLDEN / prompts["source"])
    tiny_target(tmp_path / "state" / "models" / NAME)
    with tarfile.open(GOLDEN / "state.tar.xz") as archive:
        archive.extractall(tmp_path / "state", filter="data")
    machine = use(Machine(tmp_path, fields))
    monkeypatch.setenv("EAGLE3_CACHE_DIR", str(cache))
    return machine


def store(machine: Machine) -> Path:
    return machine.folder / "state" / "store"


def contents(machine: Machine, keep: Callable[[str], bool] = lambda _: True) -> dict[str, str]:
    """sha256 of the store's files by path."""
    paths = {str(path.relative_to(store(machine))): path for path in store(machine).glob("**/*") if path.is_file()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if keep(name)}


def remove(machine: Machine, *steps: str) -> None:
    """Delete all of these steps, pointers too."""
    for step in steps:
        shutil.rmtree(store(machine) / "rounds" / "small" / step)
    if "published" in steps:
        shutil.rmtree(store(machine) / "published")


def of_steps(*steps: str) -> Callable[[str], bool]:
    return lambda name: name.split("/")[2] in steps and name.startswith("rounds/") and name != LOOKED_AT_AGAIN


def run(machine: Machine) -> Report:
    """Start the round; what it reports then. Every step is done and under its old key."""
    eagle3(machine.config())
    context = machine.round()
    assert look(context).done == set(KEYS)
    pointers = {step: live.key for step in KEYS if (live := context.rounds.current(step)) is not None}
    assert pointers == KEYS
    report = stored_report(context)
    assert report is not None
    return report


def test_the_keys_of_its_steps_are_what_they_were(golden: Machine) -> None:
    assert dict(golden.round().keys.items()) == KEYS


def test_another_target_or_other_prompts_have_other_keys(golden: Machine) -> None:
    """The comparison above would see it."""
    assert golden.round(prompts__count=3).keys.answers != KEYS["answers"]
    template = golden.folder / "state" / "models" / NAME / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert set(dict(golden.round().keys.items()).values()).isdisjoint(KEYS.values())


def test_every_step_is_done_and_its_states_verify(golden: Machine) -> None:
    context = golden.round()
    status = look(context)

    assert status.done == set(KEYS)
    assert status.finished
    assert status.convention is not None
    assert faulty_shards(context, deep=True) == {}
    assert golden.events() == []


def test_its_round_file_is_still_a_round(golden: Machine) -> None:
    facts = golden.round().rounds.provenance()

    assert facts is not None
    assert facts["keys"] == KEYS
    assert build_round(facts["round"]).extract == golden.config().extract


def test_it_is_reported_again_and_nothing_is_made_anew(golden: Machine) -> None:
    before = contents(golden)
    written = {path: path.stat().st_mtime_ns for path in store(golden).glob("**/*") if path.is_file()}
    report = run(golden)
    after = contents(golden)

    assert golden.events() == [], "no engine is started"
    assert after.keys() - before.keys() == set()
    assert before.keys() - after.keys() == set()
    changed = {name for name in before if after[name] != before[name]}
    assert changed <= {PROVENANCE}
    anew = {path for path, when in written.items() if path.stat().st_mtime_ns != when}
    assert {path.name for path in anew} <= {"round.yaml", "current.json"}
    assert report.training.steps == 4
    assert report.counts["samples"] == SAMPLES


def test_without_evaluation_and_what_follows_it_goes_on_from_the_draft(golden: Machine) -> None:
    remove(golden, "eval", "published", "report")
    kept = of_steps("answers", "samples", "hidden", "convention", "draft")
    before = contents(golden, kept)
    assert look(golden.round()).done == {"answers", "samples", "hidden", "draft"}
    report = run(golden)

    assert contents(golden, kept) == before
    assert golden.launches() == {"plain": 1, "bench": 1}
    assert golden.requests("extract") == Counter()
    assert {item.step for item in report.steps if not item.reused} >= {"evaluate", "publish"}
    assert {item.step for item in report.steps if item.reused} >= {"generate", "prepare", "extract", "train"}
    assert report.training.coverage is None, "the draft's version of the code did not note it"
    assert (store(golden) / LOOKED_AT_AGAIN).read_text() == "0"


def test_samples_that_are_gone_are_made_again_of_the_answers_by_todays_rules(golden: Machine) -> None:
    """The code of then went on after an answer that was cut; what followed counts no more when samples are made."""
    before = contents(golden, of_steps("answers"))
    remove(golden, "samples")
    assert look(golden.round()).answers.done
    assert not prepare(golden.round())

    assert contents(golden, of_steps("answers")) == before
    counts = sample_counts(golden.round())
    assert (counts["answers"], counts["truncated"], counts[CUT]) == (8, 4, 4)
    assert {sample.sample_id for sample in golden.round().samples} == {"tides#0", "moss#0", "salt#0", "lenses#0"}


def test_one_shard_that_is_gone_is_extracted_and_the_other_is_kept(golden: Machine) -> None:
    lost = store(golden) / "rounds" / "small" / "hidden" / KEYS["hidden"] / "00001"
    objects = {path.name.rsplit("-", 1)[0]: path.stat().st_size for path in lost.glob("*.safetensors")}
    shutil.rmtree(lost)
    remove(golden, "draft", "eval", "published", "report")
    kept = of_steps("answers", "samples", "convention")
    before = contents(golden, kept) | contents(golden, lambda name: "/hidden/" in name and "/00000/" in name)
    status = look(golden.round())
    assert (status.hidden.state, status.done) == ("partly", {"answers", "samples"})
    report = run(golden)

    assert before.items() <= contents(golden).items()
    assert golden.launches() == {"extract": 1, "plain": 1, "bench": 1}
    assert sum(golden.requests("extract").values()) == 1, "the shard holds one row"
    assert {path.name.rsplit("-", 1)[0]: path.stat().st_size for path in lost.glob("*.safetensors")} == objects
    assert faulty_shards(golden.round(), deep=True) == {}
    assert {item.step for item in report.steps if item.reused} >= {"generate", "prepare", "convention"}
    assert next(item for item in report.steps if item.step == "extract").resumed


def test_a_damaged_shard_is_seen(golden: Machine) -> None:
    shard = next(store(golden).glob("rounds/small/hidden/*/00001/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0xFF
    shard.write_bytes(bytes(data))

    assert [plan.number for plan in faulty_shards(golden.round(), deep=True)] == [1]


def test_a_finished_round_is_shown_and_nothing_is_started(
    golden: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = golden.config()
    monkeypatch.setattr(round_command, "open_deployed", lambda *_: config)
    monkeypatch.setattr(round_command, "_run", lambda *_: pytest.fail("a run was started"))
    round_command.run_round(config.name, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["state"], facts["run"], facts["report"]["round"]) == ("Completed", None, config.name)
    assert not round_command.finished(golden.config(train__epochs=9), Settings()), "a changed round is not done"
    rounds = golden.round().rounds
    rounds.point("draft", "0" * 12, {})
    assert not round_command.finished(config, Settings()), "another draft is the live one"
