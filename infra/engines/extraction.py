"""Getting the hidden states of token sequences out of a server with profile ``extract``.

The server answers with the name of a file in the staging folder and writes it afterwards, holding an exclusive lock on
``<file>.lock`` until it is written.
"""

import fcntl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from infra.engines.client import Client
from infra.errors import EngineError

LOCK_POLL_SECONDS = 0.005


class ExtractionFault(EngineError):
    """States that must not be used: missing, incomplete, or not of the tokens that were sent."""


@dataclass(frozen=True)
class States:
    """Hidden states of one token sequence.

    Args:
        hidden_states: bfloat16 [tokens, taps + 1, hidden]; the taps ascending, tap L (pre-norm) last. An engine that
            computes in float32 gives float32, which is rounded here.
        token_ids: int64 [tokens].
        next_token: the token that the engine, greedy, went on with.
    """

    hidden_states: torch.Tensor
    token_ids: torch.Tensor
    next_token: int


class Extractor:
    """Asks for states, checks them, and removes the file they came in. May be shared between threads.

    Args:
        client: a client of a server with profile ``extract``.
        staging: the folder that the server was launched with.
        taps: the taps it was launched with.
        hidden_size: width of the target's residual stream.
        timeout: longest wait for the file after the answer, seconds.
    """

    def __init__(
        self, client: Client, staging: Path, taps: Sequence[int], hidden_size: int, timeout: float = 120.0
    ) -> None:
        self._client, self._staging, self._timeout = client, staging.resolve(), timeout
        self._slots, self._hidden_size = len(taps) + 1, hidden_size

    def extract(self, token_ids: Sequence[int]) -> States:
        """States of every token of the sequence, checked.

        Raises:
            RequestRefused: the engine does not take this sequence.
            ExtractionFault: what it gave is missing, incomplete, not finite, or of other tokens.
            EngineError: the server cannot be reached or fails.
        """
        path, next_token = self._request(token_ids)
        file = self._within_staging(path)
        lock = file.with_name(file.name + ".lock")
        try:
            self._wait_written(file, lock)
            states = _load(file, next_token)
        finally:
            file.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
        self._check(states, token_ids, file.name)
        return states

    def _request(self, token_ids: Sequence[int]) -> tuple[str, int]:
        payload = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
        answer = self._client.complete(payload)
        if answer["choices"][0].get("prompt_token_ids") != list(token_ids):
            raise ExtractionFault(f"the engine worked on other tokens than the {len(token_ids)} it was sent")
        path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(path, str):
            raise ExtractionFault(
                "the engine answered without a path of hidden states",
                expected="a server started with profile `extract`",
            )
        return path, int(answer["choices"][0]["token_ids"][0])

    def _within_staging(self, path: str) -> Path:
        """The file's real place; a server must not make this process read or delete anything else."""
        file = Path(path).resolve()
        if file.parent != self._staging or file.suffix != ".safetensors":
            raise ExtractionFault(
                f"the engine named {path} as its file of states", expected=f"a .safetensors file in {self._staging}"
            )
        return file

    def _wait_written(self, file: Path, lock: Path) -> None:
        try:
            with lock.open("rb") as stream:
                self._wait_lock(stream, file)
        except FileNotFoundError:
            raise ExtractionFault(f"the engine made no lock file for {file.name}") from None
        if not file.is_file():
            raise ExtractionFault(
                f"the engine did not write {file.name}",
                expected="the file, once its lock is released",
                fix="read the engine's log",
            )

    def _wait_lock(self, stream: IO[bytes], file: Path) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            if time.monotonic() > deadline:
                raise ExtractionFault(
                    f"{file.name} was not written within {self._timeout:.0f} s of the engine's answer"
                )
            time.sleep(LOCK_POLL_SECONDS)

    def _check(self, states: States, token_ids: Sequence[int], name: str) -> None:
        expected = (len(token_ids), self._slots, self._hidden_size)
        if tuple(states.hidden_states.shape) != expected:
            raise ExtractionFault(
                f"{name} holds states of shape {list(states.hidden_states.shape)}",
                expected=f"{list(expected)} (tokens, taps + 1, hidden)",
            )
        if states.token_ids.tolist() != list(token_ids):
            raise ExtractionFault(f"{name} holds states of other tokens than the {len(token_ids)} that were sent")
        if not torch.isfinite(states.hidden_states).all():
            raise ExtractionFault(f"{name} holds NaN or Inf")
        empty = (states.hidden_states == 0).all(dim=-1)
        if empty.any():
            raise ExtractionFault(
                f"{name} holds only zeros for {int(empty.sum())} of its states",
                expected="a state for each token and tap",
            )


def _load(file: Path, next_token: int) -> States:
    try:
        tensors = load_file(file, device="cpu")
        hidden, token_ids = tensors["hidden_states"], tensors["token_ids"]
    except (SafetensorError, KeyError) as error:
        raise ExtractionFault(f"{file.name} cannot be read: {error}") from error
    if hidden.dtype not in (torch.bfloat16, torch.float32):
        raise ExtractionFault(
            f"{file.name} holds states of {hidden.dtype}", expected="bfloat16, or float32 to be rounded"
        )
    return States(hidden.to(torch.bfloat16), token_ids.to(torch.int64), next_token)
