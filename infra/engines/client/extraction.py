"""Getting the hidden states of token sequences out of a server with profile ``extract``, whichever engine it is.

The server answers with the name of a file in the staging folder and writes it afterwards, holding an exclusive lock on
``<file>.lock`` until it is written.
"""

import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from infra.engines.client.client import Client
from infra.errors import EngineError, ExtractionFault
from infra.targets.final_norm import FinalNorm

LOCK_POLL_SECONDS = 0.005
HEADER_BYTES = 1 << 20
"""More than any header of two tensors takes."""
INFINITY, SIGN = 0x7F80, 0x8000
"""Bits of bfloat16: those of infinity, beyond which is NaN, and that of negative numbers."""
Bools = npt.NDArray[np.bool_]
PROBE = tuple(range(1, 9))
"""Token ids that every vocabulary has."""


@dataclass(frozen=True)
class States:
    """Hidden states of one token sequence.

    Args:
        hidden_states: bfloat16 [tokens, taps + 1, hidden]; the taps ascending, tap L last (see :class:`Extractor`). An
            engine that computes in float32 gives float32, which is rounded here.
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
        final_norm: the target's final norm, for an engine that gives the last slot after it: the slot is divided by
            the norm's weight (``unit_rms``). None for an engine that gives it before the norm (``pre_norm``).
        layer_ids: the engine's ids of the taps, to be compared with those that an engine reports to have captured.
    """

    def __init__(
        self,
        client: Client,
        staging: Path,
        taps: Sequence[int],
        hidden_size: int,
        timeout: float = 120.0,
        *,
        final_norm: FinalNorm | None = None,
        layer_ids: Sequence[int] | None = None,
    ) -> None:
        self._client, self._staging, self._timeout = client, staging.resolve(), timeout
        self._slots, self._hidden_size = len(taps) + 1, hidden_size
        self._final_norm, self._layer_ids = final_norm, layer_ids

    def prove(self) -> None:
        """Show that this server's extraction works, before anything it gives is used.

        The same few tokens are sent twice: an engine that reuses a prefix gives no states for the second.

        Raises:
            EngineError: it does not, in the words of :meth:`extract`.
        """
        for _ in range(2):
            self.extract(PROBE)

    def extract(self, token_ids: Sequence[int]) -> States:
        """States of every token of the sequence, checked.

        Raises:
            RequestRefused: the engine does not take this sequence.
            ExtractionFault: what it gave is missing, incomplete, not finite, or of other tokens.
            EngineError: the server cannot be reached or fails.
        """
        answer = self._client.extract(token_ids)
        file = self._within_staging(answer.path)
        lock = file.with_name(file.name + ".lock")
        try:
            self._check_ids(answer.layer_ids)
            self._wait_written(file, lock)
            self._check_size(file, len(token_ids))
            states = _load(file, answer.next_token, self._final_norm)
        except OSError as error:
            raise ExtractionFault(f"{file.name} cannot be read: {error.strerror or error}") from error
        finally:
            with suppress(OSError):
                file.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
        self._check(states, token_ids, file.name)
        return states

    def _check_ids(self, reported: Sequence[int] | None) -> None:
        if self._layer_ids is not None and reported is not None and list(reported) != list(self._layer_ids):
            raise ExtractionFault(
                f"the engine captures its layers {list(reported)}",
                expected=f"{list(self._layer_ids)}, the ids of the round's taps",
                fix="see that no rung of the engine's ladder sets its own",
            )

    def _within_staging(self, path: str) -> Path:
        """The file's real place; a server must not make this process read or delete anything else."""
        try:
            file = Path(path).resolve()
        except (OSError, ValueError, RuntimeError):  # a name that no file can have, or links in a circle
            file = Path()
        if file.parent != self._staging or file.suffix != ".safetensors":
            raise ExtractionFault(
                f"the engine named {path!r:.300} as its file of states",
                expected=f"a .safetensors file in {self._staging}",
            )
        return file

    def _wait_written(self, file: Path, lock: Path) -> None:
        try:
            # Not waiting for a writer, should it be a pipe.
            with open(os.open(lock, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
                self._wait_lock(stream, file)
        except FileNotFoundError:
            raise ExtractionFault(f"the engine made no lock file for {file.name}") from None
        if not file.is_file():
            raise ExtractionFault(
                f"the engine did not write {file.name}",
                expected="the file, once its lock is released",
                fix="read the engine's log",
            )

    def _check_size(self, file: Path, tokens: int) -> None:
        """Before any of it is read into memory."""
        most = tokens * (4 * self._slots * self._hidden_size + 8) + HEADER_BYTES
        if (size := file.stat().st_size) > most:
            raise ExtractionFault(
                f"{file.name} has {size:,} bytes", expected=f"at most {most:,}, the float32 states of {tokens} tokens"
            )

    def _wait_lock(self, stream: IO[bytes], file: Path) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            if self._client.closed:
                raise EngineError(f"the client was closed before {file.name} was written")
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
        if not np.array_equal(states.token_ids.numpy(), np.asarray(token_ids)):
            raise ExtractionFault(f"{name} holds states of other tokens than the {len(token_ids)} that were sent")
        broken, empty = _faults(states.hidden_states)
        if broken.any():
            raise ExtractionFault(f"{name} holds NaN or Inf")
        if empty.any():
            raise ExtractionFault(
                f"{name} holds only zeros for {int(empty.sum())} of its states",
                expected="a state for each token and tap",
            )


def _faults(states: torch.Tensor) -> tuple[Bools, Bools]:
    """Which vectors of bfloat16 states [..., hidden] hold NaN or Inf, and which only zeros.

    By the largest bit patterns of positive and of negative numbers, which numpy finds at the speed of memory, with no
    copy and with other threads running.
    """
    bits = states.view(torch.int16).numpy()
    positive, negative = bits.max(axis=-1), bits.view(np.uint16).max(axis=-1)
    broken = (positive >= INFINITY) | (negative >= SIGN + INFINITY)
    empty = (negative == 0) | ((negative == SIGN) & (positive <= 0))
    return broken, empty


def _load(file: Path, next_token: int, final_norm: FinalNorm | None) -> States:
    try:
        tensors = load_file(file, device="cpu")
        hidden, token_ids = tensors["hidden_states"], tensors["token_ids"]
    except (SafetensorError, KeyError) as error:
        raise ExtractionFault(f"{file.name} cannot be read: {error}") from error
    if hidden.dtype not in (torch.bfloat16, torch.float32):
        raise ExtractionFault(
            f"{file.name} holds states of {hidden.dtype}", expected="bfloat16, or float32 to be rounded"
        )
    states = hidden.to(torch.bfloat16)
    if final_norm is not None and hidden.ndim == 3 and hidden.shape[-1] == len(final_norm.weight):
        states[:, -1] = final_norm.unit_rms(hidden[:, -1]).to(torch.bfloat16)
    return States(states, token_ids.to(torch.int64), next_token)
