"""Draft vocabulary and the trainer's dataset."""

from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest

from infra.drafter.dataset import FACTS, read_facts, train_ratio, write_dataset
from infra.drafter.vocabulary import choose_vocabulary, token_frequencies
from infra.errors import TrainingError
from infra.store.samples import Sample


def sample(row: int, ids: list[int], mask: list[int], split: str = "train") -> Sample:
    return Sample(row, f"s{row}", [], ids, mask, split, "stop", "vllm", {})  # type: ignore[arg-type]


SAMPLES = [
    sample(0, [7, 5, 5, 3], [0, 1, 1, 1]),
    sample(1, [7, 5, 3, 9], [0, 0, 1, 1]),
    sample(2, [1, 1, 1], [1, 1, 1], "heldout"),
]


def test_only_supervised_tokens_of_training_samples_count() -> None:
    assert token_frequencies(SAMPLES) == {5: 2, 3: 2, 9: 1}


def test_the_most_frequent_tokens_are_chosen_and_ties_take_the_lower_id() -> None:
    vocabulary = choose_vocabulary({5: 2, 3: 2, 9: 1, 8: 1}, 3, 20)
    assert vocabulary is not None
    assert vocabulary.token_ids.tolist() == [3, 5, 8]
    assert vocabulary.coverage == pytest.approx(5 / 6)
    assert (vocabulary.d2t + np.arange(3)).tolist() == [3, 5, 8]
    assert np.flatnonzero(vocabulary.t2d).tolist() == [3, 5, 8]
    assert len(vocabulary.t2d) == 20


def test_unseen_low_ids_fill_up() -> None:
    vocabulary = choose_vocabulary({0: 4, 7: 1}, 4, 10)
    assert vocabulary is not None
    assert vocabulary.token_ids.tolist() == [0, 1, 2, 7]
    assert vocabulary.coverage == 1.0


@pytest.mark.parametrize("size", [None, 10, 11])
def test_a_whole_vocabulary_needs_no_mapping(size: int | None) -> None:
    assert choose_vocabulary({}, size, 10) is None


def test_without_frequencies_a_smaller_vocabulary_is_refused() -> None:
    with pytest.raises(TrainingError, match="no token is supervised"):
        choose_vocabulary({}, 4, 10)


def test_tokens_of_another_target_are_refused() -> None:
    with pytest.raises(TrainingError, match="do not fit the target's vocabulary of 8"):
        choose_vocabulary({9: 1}, 4, 8)


def test_the_split_is_exact_for_every_size() -> None:
    for rows in range(2, 3000):
        for train in {1, rows // 2 or 1, rows * 9 // 10 or 1, rows - 1}:
            ratio = train_ratio(rows, train)
            assert int(rows * ratio) == train
            assert 0 < ratio < 1


@pytest.mark.parametrize("train", [0, 5])
def test_an_empty_split_is_refused(train: int) -> None:
    with pytest.raises(TrainingError, match="at least one training and one held-out"):
        train_ratio(5, train)


def test_the_dataset_reads_back_as_tensors_and_is_not_written_twice(tmp_path: Path) -> None:
    vocabulary = choose_vocabulary(token_frequencies(SAMPLES), 2, 10)
    folder = tmp_path / "dataset"
    facts = write_dataset(SAMPLES, folder, vocabulary)
    assert (facts.rows, facts.train_rows, facts.train_tokens) == (3, 2, 8)
    table = datasets.load_from_disk(str(folder))
    assert table[0]["input_ids"].tolist() == [7, 5, 5, 3]
    assert table[1]["loss_mask"].tolist() == [0, 0, 1, 1]
    assert list(table.with_format(None)["seq_len"]) == [4, 4, 3]
    assert np.load(folder / "d2t-2.npy", allow_pickle=False).tolist() == [3, 4]

    before = (folder / "state.json").stat().st_mtime_ns
    assert write_dataset(SAMPLES, folder, vocabulary) == facts == read_facts(folder)
    assert (folder / "state.json").stat().st_mtime_ns == before
    for damage in ("", "[1]", "{}", "nonsense"):
        (folder / FACTS).write_text(damage)
        assert read_facts(folder) is None
        assert write_dataset(SAMPLES, folder, vocabulary) == facts == read_facts(folder)

    changed = [replace(SAMPLES[0], loss_mask=[0, 0, 0, 1]), *SAMPLES[1:]]
    assert write_dataset(changed, folder, vocabulary).digest != facts.digest
    assert datasets.load_from_disk(str(folder))[0]["loss_mask"].tolist() == [0, 0, 0, 1]


def test_rows_out_of_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="has row 0 after row 1"):
        write_dataset([SAMPLES[1], SAMPLES[0]], tmp_path / "dataset", None)
    late = [SAMPLES[0], replace(SAMPLES[2], row=1), replace(SAMPLES[1], row=2)]
    with pytest.raises(TrainingError, match="follows held-out rows"):
        write_dataset(late, tmp_path / "dataset", None)
    assert not (tmp_path / "dataset").exists()
