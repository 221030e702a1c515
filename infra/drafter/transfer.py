"""How speculators' trainer gets hidden states: straight out of the store.

Importing this module registers the backend ``eagle3-store``; that must happen before speculators' own command line
is imported, which collects the backends' arguments once.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer

from infra.drafter.dataset import BACKEND, dataset_rows
from infra.store.reader import StatesReader


class StatesMismatch(RuntimeError):
    """The stored states of a row are not the states of the row's tokens."""


class StatesTransfer(HiddenStatesTransfer):
    """Rows of a round's hidden states; picklable, opened where they are first read.

    Args:
        url: the store's fsspec URL.
        prefix: path of the hidden states inside the store.
        dataset: the trainer's dataset folder, which tells the row of each of its samples; each is held against its
            ``input_ids``, because the trainer itself drops a sample that does not match and goes on.
    """

    def __init__(self, url: str, prefix: str, dataset: Path) -> None:
        self.url, self.prefix, self.dataset = url, prefix, dataset
        self._reader: StatesReader | None = None
        self._tokens: Dataset | None = None
        self._rows: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_tokens": None, "_rows": []}

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor]:
        """``hidden_states`` [tokens, taps + 1, hidden], ``token_ids`` int64 [tokens] of the dataset's n-th sample.

        Raises:
            StatesMismatch: the stored token ids are not the dataset's.
        """
        if self._reader is None or self._tokens is None:
            self._reader = StatesReader(self.url, self.prefix)
            self._rows = dataset_rows(self.dataset)
            self._tokens = load_from_disk(str(self.dataset)).with_format("torch", columns=["input_ids"])
        row = self._rows[file_idx]
        states = self._reader.read(row)
        expected, found = self._tokens[file_idx]["input_ids"], states["token_ids"]
        if not torch.equal(found, expected):
            raise StatesMismatch(
                f"row {row}: the hidden states under {self.prefix} belong to other tokens "
                f"({len(found)} stored, {len(expected)} in the sample)"
            )
        return states

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Never: training reads what was extracted and verified, it asks no engine."""
        raise NotImplementedError(
            "the trainer was told to generate hidden states; it must be run with --on-missing raise"
        )


@HiddenStatesBackend.register(BACKEND)
class StoreBackend(HiddenStatesBackend):
    """The arguments ``--states-url`` and ``--states-prefix`` of ``speculators train``."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Add the two arguments."""
        parser.add_argument("--states-url", type=str, default=None, help="fsspec URL of the store.")
        parser.add_argument("--states-prefix", type=str, default=None, help="Path of the hidden states in the store.")

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> StatesTransfer:
        """The transfer for one training."""
        return StatesTransfer(args.states_url, args.states_prefix, Path(data_path))

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """None: engines are not launched through speculators."""

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Never: engines are not launched through speculators."""
        raise NotImplementedError("this backend only reads")
