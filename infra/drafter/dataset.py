"""The dataset folder that speculators' trainer reads."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import datasets

from infra.drafter.vocabulary import Vocabulary
from infra.errors import TrainingError
from infra.store.samples import Sample

BACKEND = "eagle3-store"
"""Name under which the trainer knows our way of reading hidden states."""

BATCH_ROWS = 1024
FACTS = "eagle3.json"
ROWS = "rows.json"
"""File of the dataset that lists the row of each of its samples: quarantined rows are not in it."""


@dataclass(frozen=True)
class DatasetFacts:
    """What a dataset folder holds.

    Args:
        rows: samples, training ones first.
        train_rows: training samples.
        train_tokens: tokens of the training samples.
        digest: SHA-256 of every sample's row, tokens and mask, and of the draft vocabulary.
    """

    rows: int
    train_rows: int
    train_tokens: int
    digest: str

    @property
    def ratio(self) -> float:
        """Fraction that puts the trainer's boundary ``int(rows * ratio)`` exactly at ``train_rows``."""
        return train_ratio(self.rows, self.train_rows)


def train_ratio(rows: int, train_rows: int) -> float:
    """A fraction whose product with ``rows`` is cut to ``train_rows``: half a row off, rounding cannot matter.

    Raises:
        TrainingError: one of the two splits would be empty.
    """
    if not 0 < train_rows < rows:
        raise TrainingError(
            f"{train_rows} of {rows} samples are for training", expected="at least one training and one held-out sample"
        )
    return (train_rows + 0.5) / rows


def write_dataset(samples: Sequence[Sample], folder: Path, vocabulary: Vocabulary | None) -> DatasetFacts:
    """Write ``samples`` as an Arrow dataset with the vocabulary's files beside it; done already: nothing is written.

    Columns: ``input_ids`` and ``loss_mask`` int64, ``seq_len``. The folder appears whole or not at all.

    Args:
        samples: in the order of their rows, which may have gaps (:func:`dataset_rows` tells them).

    Raises:
        TrainingError: rows do not ascend with training samples first, or a split is empty.
    """
    facts = _facts(samples, vocabulary)
    if read_facts(folder) == facts:
        return facts
    partial = folder.with_name(folder.name + ".partial")
    for stale in (partial, folder):
        shutil.rmtree(stale, ignore_errors=True)
    table = _table(samples)
    try:
        # The trainer compares tensors: without the torch format saved with it, every row would be a list.
        table.with_format("torch").save_to_disk(str(partial), num_proc=None)
        if vocabulary is not None:
            vocabulary.save(partial)
        (partial / ROWS).write_text(json.dumps([sample.row for sample in samples]))
        (partial / FACTS).write_text(json.dumps(asdict(facts)))
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk its room is wanted
        raise
    return facts


def _table(samples: Sequence[Sample]) -> datasets.Dataset:
    """The dataset's columns; a batch at a time is in memory as Python numbers."""
    kinds = {
        "input_ids": datasets.List(datasets.Value("int64")),
        "loss_mask": datasets.List(datasets.Value("int64")),
        "seq_len": datasets.Value("int64"),
    }
    tables = []
    rest = iter(samples)
    while batch := list(islice(rest, BATCH_ROWS)):
        columns = {
            "input_ids": [list(sample.input_ids) for sample in batch],
            "loss_mask": [[int(mask) for mask in sample.loss_mask] for sample in batch],
            "seq_len": [len(sample.input_ids) for sample in batch],
        }
        tables.append(datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)))
    return datasets.concatenate_datasets(tables)


def read_facts(folder: Path) -> DatasetFacts | None:
    """What ``folder`` holds, or None when there is no complete dataset (a machine that lost power can leave half)."""
    try:
        return DatasetFacts(**json.loads((folder / FACTS).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def dataset_rows(folder: Path) -> list[int]:
    """The row of each of the dataset's samples, in its order."""
    rows: list[int] = json.loads((folder / ROWS).read_text())
    return rows


def _facts(samples: Sequence[Sample], vocabulary: Vocabulary | None) -> DatasetFacts:
    train, tokens, last = 0, 0, -1
    digest = hashlib.sha256()
    for position, sample in enumerate(samples):
        if sample.row <= last:
            raise TrainingError(f"sample {sample.sample_id} has row {sample.row} after row {last}")
        last = sample.row
        if sample.split == "train":
            if train != position:
                raise TrainingError(
                    f"training row {sample.row} follows held-out rows", expected="training samples first"
                )
            train += 1
            tokens += len(sample.input_ids)
        digest.update(
            json.dumps([sample.row, list(sample.input_ids), [int(mask) for mask in sample.loss_mask]]).encode()
        )
    if vocabulary is not None:
        digest.update(vocabulary.token_ids.tobytes())
    train_ratio(len(samples), train)
    return DatasetFacts(len(samples), train, tokens, digest.hexdigest())
