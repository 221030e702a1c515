"""The real trainer on a tiny random target: finished, killed, interrupted, and fed with the wrong states."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from standin.gate import Gate
from standin.perturbed import perturbed
from standin.training import PREFIX, TRAIN, Trainee

from infra.drafter import trainer
from infra.drafter.acceptance import bootstrap
from infra.drafter.checkpoint import publishable, settle, verify_draft
from infra.drafter.progress import TrainProgress
from infra.drafter.start import read_start, start_faults
from infra.drafter.trainer import TrainerKilled, train
from infra.drafter.vocabulary import choose_vocabulary, token_frequencies
from infra.drafter.walk import walk
from infra.drafter.walk_entry import draft_chains, load_draft
from infra.engines.draft import read_config
from infra.errors import GateError, TrainingError
from infra.machine.processes.guarded import recorded
from infra.store.reader import StatesReader
from infra.store.samples import Sample

pytestmark = pytest.mark.timeout(900)


class Stopped(Exception):
    """Raised by a callback in the middle of a training."""


def test_trains_to_the_end_and_the_draft_can_be_used(tmp_path: Path, trainee: Trainee) -> None:
    samples = trainee.samples
    seen: list[TrainProgress] = []
    job = trainee.job(tmp_path / "work", epochs=6, layers=2)
    result = train(job, samples, run_dir=tmp_path / "run", on_metrics=seen.append)

    assert result.steps == len(result.history) == 6 * TRAIN // 2
    assert [item.step for item in result.history] == list(range(result.steps))
    assert result.history[-1].loss < result.history[0].loss
    assert [item.epoch for item in result.validations] == [0, 1, 2, 3, 4, 5]
    assert len(result.validations[0].joint) == 3
    assert seen[-1].done == seen[-1].total == result.steps
    assert seen[-1].seconds_left == 0
    assert 0 < result.coverage <= 1
    assert result.tokens_per_second > 0
    assert not result.reused
    assert recorded(tmp_path / "run") == []

    events = job.events.read_bytes()
    again = train(job, samples, run_dir=tmp_path / "run")
    assert again.reused
    assert again.checkpoint == result.checkpoint
    assert job.events.read_bytes() == events

    draft = publishable(result.checkpoint, tmp_path / "draft", "org/tiny")
    verify_draft(draft, job.shape)
    assert str(trainee.target.path) not in (draft / "config.json").read_text()

    sees_only_what_serving_has(draft, trainee.url)

    def walked(folder: Path) -> float:
        outcome = walk(
            folder, samples[:TRAIN], states_url=trainee.url, states_prefix=PREFIX, drafts=3,
            workdir=tmp_path / f"walk-{folder.name}", run_dir=tmp_path / "run",
        )  # fmt: skip
        assert [sample.row for sample in outcome.samples] == list(range(TRAIN))
        assert bootstrap(outcome.parts).low <= outcome.predicted.length <= bootstrap(outcome.parts).high
        assert outcome.joint[0] == outcome.conditional[0] >= outcome.joint[1] >= outcome.joint[2]
        return outcome.predicted.length

    wrong = perturbed(draft, tmp_path / "wrong", "layers_permuted")
    assert walked(draft) > walked(wrong) >= 1.0


def sees_only_what_serving_has(draft: Path, url: str) -> None:
    """Draft k of position i comes from states up to i and tokens up to i + 1 + k, whatever follows."""
    model = load_draft(draft)
    row = StatesReader(url, PREFIX).read(TRAIN)
    states, tokens = row["hidden_states"].clone(), row["token_ids"].clone()
    chains = draft_chains(model, states, tokens, 3)
    position = 11
    states[position + 1 :] = 7.0
    for step in range(3):
        later = tokens.clone()
        later[position + 2 + step :] = 0
        assert draft_chains(model, states, later, 3)[step, position] == chains[step, position]
    states[position] = -7.0
    assert not torch.equal(draft_chains(model, states, tokens, 3)[:, position:], chains[:, position:])


def test_goes_on_after_an_interrupt_and_after_kill_9(
    tmp_path: Path, trainee: Trainee, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = trainee.samples
    run_dir = tmp_path / "run"
    job = trainee.job(tmp_path / "work", max_steps=15, checkpoints_per_epoch=2)

    def stop_at_two(progress: TrainProgress) -> None:
        if progress.done == 2:
            raise Stopped

    monkeypatch.setattr(trainer, "PYTHON", Gate(tmp_path, steps=2).python)
    with pytest.raises(Stopped):
        train(job, samples, run_dir=run_dir, on_metrics=stop_at_two)
    assert recorded(run_dir) == []
    assert settle(job.checkpoints) == [], "an interrupt makes no checkpoint"

    def kill_after_a_checkpoint(progress: TrainProgress) -> None:
        if progress.done == 7:
            [record] = recorded(run_dir)
            os.kill(record.child_pid, signal.SIGKILL)

    monkeypatch.setattr(trainer, "PYTHON", Gate(tmp_path, steps=7).python)
    with pytest.raises(TrainingError, match="status -9 after 7 steps"):
        train(job, samples, run_dir=run_dir, on_metrics=kill_after_a_checkpoint)
    monkeypatch.undo()
    # What a kill in the middle of a save leaves behind.
    torn = job.checkpoints / "1"
    torn.mkdir(exist_ok=True)
    (torn / "model.safetensors").write_bytes(b"\0" * 10)
    with job.events.open("a") as stream:
        stream.write('{"train": {"lo')

    result = train(job, samples, run_dir=run_dir)
    assert result.steps == len(result.history) == 15
    assert result.resumed_at == 5
    assert json.loads((result.checkpoint / "training_state.json").read_text())["global_step"] in (10, 15)

    calm = train(replace(job, workdir=tmp_path / "calm"), samples, run_dir=run_dir)
    assert [step.loss for step in result.history] == [step.loss for step in calm.history]
    name = "model.safetensors"
    assert (result.checkpoint / name).read_bytes() == (calm.checkpoint / name).read_bytes(), "killed or not, one draft"


def test_goes_on_from_an_earlier_draft_and_keeps_its_vocabulary(tmp_path: Path, trainee: Trainee) -> None:
    run_dir = tmp_path / "run"
    first = train(trainee.job(tmp_path / "first", epochs=4), trainee.samples, run_dir=run_dir)
    earlier = publishable(first.checkpoint, tmp_path / "earlier", "org/tiny")
    start = read_start("earlier", earlier)
    further = [
        replace(sample, loss_mask=[1] * len(sample.input_ids)) if sample.row % 2 else sample
        for sample in trainee.samples
    ]
    job = replace(trainee.job(tmp_path / "further", max_steps=2), start=start)
    assert list(start_faults(start, job.shape, read_config(first.checkpoint), trainee.target)) == []
    result = train(job, further, run_dir=run_dir)

    assert result.history[0].loss < 0.7 * first.history[0].loss, "it knows already what the earlier draft knows"
    own, kept = (load_file(folder / "model.safetensors") for folder in (result.checkpoint, earlier))
    by_frequency = choose_vocabulary(token_frequencies(further), 128, trainee.target.shape.vocab_size)
    assert by_frequency is not None
    assert by_frequency.d2t.tolist() != kept["d2t"].tolist() == own["d2t"].tolist()
    assert own["fc.weight"].dtype == torch.float32
    assert not torch.equal(own["fc.weight"].to(torch.bfloat16), kept["fc.weight"])
    verify_draft(publishable(result.checkpoint, tmp_path / "draft", "org/tiny"), job.shape)


def test_a_trainer_that_hangs_is_ended_and_the_next_attempt_goes_on(tmp_path: Path, trainee: Trainee) -> None:
    run_dir = tmp_path / "run"
    job = trainee.job(tmp_path / "work", max_steps=6, silence_seconds=3.0)

    def freeze(progress: TrainProgress) -> None:
        for record in recorded(run_dir):
            os.kill(record.child_pid, signal.SIGSTOP)

    with pytest.raises(TrainerKilled, match=r"hung and was ended: silent for 3 s after \d+ of \d+ steps"):
        train(job, trainee.samples, run_dir=run_dir, on_metrics=freeze)
    assert recorded(run_dir) == []
    patient = replace(job, config=job.config.model_copy(update={"silence_seconds": 600.0}))
    assert train(patient, trainee.samples, run_dir=run_dir).steps == 6


def test_states_of_other_tokens_stop_the_round(tmp_path: Path, trainee: Trainee) -> None:
    samples = trainee.samples
    other = _with_tokens(samples, row=3, tokens=[(token + 1) % 32 for token in samples[3].input_ids])
    with pytest.raises(GateError, match=r"training gate: row 3: the hidden states .* belong to other tokens"):
        train(trainee.job(tmp_path / "work"), other, run_dir=tmp_path / "run")
    assert recorded(tmp_path / "run") == []


def _with_tokens(samples: Sequence[Sample], row: int, tokens: list[int]) -> list[Sample]:
    return [replace(sample, input_ids=tokens) if sample.row == row else sample for sample in samples]
