"""The walk over an answer, and the trainer's event stream."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.config.round import TargetShape
from infra.config.training import TrainConfig
from infra.drafter.acceptance import ChainCounts
from infra.drafter.dataset import DatasetFacts
from infra.drafter.job import TrainJob, trainer_command
from infra.drafter.progress import EventFile, TrainingEvents
from infra.drafter.start import Start
from infra.drafter.walk import Steps, accepted_from, count_steps, walk_chain
from infra.errors import GateError
from infra.targets.target import Target


def right(rows: list[str]) -> np.ndarray:
    """``1`` where the draft is right; columns are positions."""
    return np.array([[letter == "1" for letter in row] for row in rows])


def walked(correct: np.ndarray, first: int, end: int) -> ChainCounts:
    return walk_chain(accepted_from(correct, first, end), len(correct))


def test_a_draft_that_is_never_right_starts_at_every_token() -> None:
    # Prompt of 3, answer of 4 tokens: 3..6. Chains at 2, 3, 4; after position 4 nothing is left to draft.
    assert walked(np.zeros((3, 7), dtype=bool), first=3, end=7) == ChainCounts(3, (0, 0, 0))


def test_a_perfect_draft_jumps_by_its_length_and_one() -> None:
    # Answer 3..12 (10 tokens): chains at 2 (tokens 4 5 6), 6 (8 9 10), 10 (12 only).
    assert walked(np.ones((3, 13), dtype=bool), first=3, end=13) == ChainCounts(3, (3, 2, 2))


def test_the_first_wrong_draft_ends_the_chain() -> None:
    correct = right(["1011110", "0111110", "1111110"])
    # Position 0: draft 0 right, draft 1 wrong -> 1 accepted, next start 2: all three right -> next start 6: end.
    assert walked(correct, first=1, end=8) == ChainCounts(2, (2, 1, 1))


def test_a_start_after_a_run_is_not_an_average_start() -> None:
    # Draft 0 is right at 0 2 4 ... only; every accepted run ends where the next start is right again.
    correct = right(["10" * 10])
    assert walked(correct, first=1, end=20).by_position == (1.0,)
    counted = count_steps(correct, first=1, end=20)
    assert counted.joint[0] / counted.positions[0] == pytest.approx(0.5, abs=0.03)


def test_answers_too_short_to_draft_in_have_no_start() -> None:
    assert walked(np.ones((2, 4), dtype=bool), first=3, end=4) == ChainCounts(0, (0, 0))


def test_each_place_of_an_answer_has_its_own_run_cut_at_the_answers_end() -> None:
    correct = right(["1011110", "0111110", "1111110"])
    # Answer 1..6: chains may start when 1 to 5 tokens of it are known.
    assert accepted_from(correct, first=1, end=7) == [1, 0, 3, 2, 1]
    assert accepted_from(correct, first=6, end=7) == []


def test_steps_are_counted_over_positions_with_a_token_to_compare() -> None:
    correct = right(["1101", "1011"])
    assert count_steps(correct, first=1, end=6) == Steps(positions=(4, 3), joint=(3, 1), reached=(4, 2))


def plan(steps: list[int], resumed_at: int = 0, epoch: int = 0) -> dict[str, Any]:
    return {"plan": {"steps": steps, "resumed_at": resumed_at, "epoch": epoch}}


def step(number: int, loss: float = 1.0, dropped: float = 0.0) -> dict[str, Any]:
    accuracies = {"full_acc_0": 0.5, "full_acc_1": 0.25, "cond_acc_0": 0.5, "cond_acc_1": 0.5}
    metrics = {"loss": loss, **accuracies, "error_records": dropped}
    profile = {"tokens_per_s": 100.0, "step_ms": 500.0}
    return {"train": metrics, "profile": profile, "epoch": 0, "lr": 0.1, "global_step": number}


def history(*events: dict[str, Any]) -> TrainingEvents:
    taken = TrainingEvents()
    for event in events:
        taken.take(event)
    return taken


def test_progress_has_rate_and_time_left() -> None:
    progress = history(plan([6, 6]), step(0), step(1), step(2)).progress()
    assert progress is not None
    assert (progress.done, progress.total, progress.seconds_left) == (3, 12, 4.5)
    assert progress.tokens_per_second == pytest.approx(100.0)
    assert progress.last.joint == (0.5, 0.25)


def test_a_resumed_attempt_takes_the_place_of_what_it_repeats() -> None:
    taken = history(
        plan([6]), *(step(number, loss=9.0) for number in range(5)), plan([6], resumed_at=3), step(3), step(4), step(5)
    )
    assert [taken.steps[number].loss for number in range(6)] == [9, 9, 9, 1, 1, 1]
    assert taken.resumed_at == 3
    assert taken.resumptions == 1
    assert history(plan([6]), step(0), plan([6])).resumptions == 0, "there was nothing to go on from"
    assert history(plan([6]), plan([6], resumed_at=1), plan([6], resumed_at=1)).resumptions == 2


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([step(0), step(1, loss=float("nan"))], "the loss is nan at step 2 of 6"),
        ([step(0, dropped=2.0)], "dropped 2 samples at step 1"),
        ([step(0), step(1, 0.0), step(2, 0.0), step(3, 0.0)], "the loss was 0 for 3 steps up to step 4"),
    ],
)
def test_faults_stop_at_once(events: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(GateError, match=said):
        history(plan([6]), *events)


def test_a_pack_without_supervised_tokens_is_no_fault() -> None:
    assert len(history(plan([6]), step(0, 0.0), step(1, 0.0), step(2)).steps) == 3


def test_a_line_cut_by_a_kill_is_dropped_and_a_line_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(plan([6])) + "\n" + '{"train": {"lo')
    EventFile(path).mend()
    events = EventFile(path)
    assert events.new() == [plan([6])]
    assert events.new() == []
    with path.open("a") as stream:
        stream.write('{"done": ')
    assert events.new() == []
    with path.open("a") as stream:
        stream.write('{"global_step": 6}}\n')
    assert events.new() == [{"done": {"global_step": 6}}]


def command(
    tmp_path: Path, device: str, size: int | None = 128, start: Start | None = None, **changes: Any
) -> list[str]:
    shape = TargetShape(layers=4, hidden_size=64, vocab_size=256, weight_bytes=1, family="llama")
    target = Target(name="tiny", path=tmp_path / "tiny", shape=shape, revision="r")
    where = ("file:///store", "rounds/r/hidden/k")
    job = TrainJob(TrainConfig(**changes), target, device, (1, 2, 3), *where, size, tmp_path)  # type: ignore[arg-type]
    job = replace(job, start=start)
    return list(trainer_command(job, DatasetFacts(100, 90, 5000, ""), Path("/env/bin/python")))


def after(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_the_command_leaves_nothing_to_the_trainers_defaults(tmp_path: Path) -> None:
    arguments = command(tmp_path, "cpu", layers=2, checkpoints_per_epoch=4, epochs=4, max_steps=7)
    assert arguments[:3] == ["/env/bin/python", "-m", "infra.drafter.trainer_entry"]
    assert "--no-norm-before-residual" in arguments
    assert "--no-norm-before-fc" in arguments
    assert "--no-norm-output" in arguments
    at = arguments.index("--full-attention-indices")
    assert arguments[at + 1 : at + 3] == ["0", "1"]
    at = arguments.index("--target-layer-ids")
    assert arguments[at + 1 : at + 4] == ["1", "2", "3"]
    assert arguments[at + 4].startswith("--")
    assert int(100 * float(after(arguments, "--train-data-ratio"))) == 90
    assert (after(arguments, "--epochs"), after(arguments, "--max-steps")) == ("4", "7")
    assert after(arguments, "--checkpoint-freq") == "0.25"
    assert (after(arguments, "--on-missing"), after(arguments, "--draft-vocab-size")) == ("raise", "128")
    assert (after(arguments, "--draft-attn-impl"), after(arguments, "--loss-implementation")) == ("sdpa", "eager")


def test_a_draft_to_start_from_has_its_layers_itself(tmp_path: Path) -> None:
    """speculators refuses flags of the decoder's shape beside it."""
    arguments = command(tmp_path, "cpu", start=Start("earlier", tmp_path / "earlier", "0123"))
    assert after(arguments, "--from-pretrained") == str(tmp_path / "start")
    assert not {"--num-layers", "--draft-arch", "--full-attention-indices"} & set(arguments)
    assert after(arguments, "--draft-vocab-size") == "128"


def test_a_whole_vocabulary_is_not_named(tmp_path: Path) -> None:
    assert "--draft-vocab-size" not in command(tmp_path, "cpu", size=None)
    assert "--draft-vocab-size" not in command(tmp_path, "cpu", size=256)


def test_several_gpus_are_driven_by_torchrun(tmp_path: Path) -> None:
    arguments = command(tmp_path, "cuda", devices=8)
    assert arguments[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    assert arguments[6:8] == ["-m", "infra.drafter.trainer_entry"]
    assert "--draft-attn-impl" not in arguments
    assert after(arguments, "--device") == "cuda"
