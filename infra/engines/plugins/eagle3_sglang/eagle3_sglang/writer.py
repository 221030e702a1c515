"""Files of states, written by threads of their own."""

import fcntl
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from .gather import HostRows

THREADS = 4
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
log = logging.getLogger(__name__)


class Writer:
    """Writes ``<rid>.safetensors``: ``hidden_states`` [tokens, layers + 1, hidden] and ``token_ids`` int64 [tokens].

    The file appears under its name only when it is whole; the exclusive lock on ``<file>.lock``, held since before the
    reply, is released right after. A released lock without a file means that the write failed.
    """

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="eagle3-writer")

    def write(self, rid: str, parts: list[HostRows]) -> Path:
        """Take the lock and return; a thread writes the file."""
        if os.sep in rid:
            raise ValueError(f"eagle3: {rid!r} names no file")
        path = self._staging / f"{rid}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._threads.submit(_write, path, lock, parts)
        return path


def _write(path: Path, lock: int, parts: list[HostRows]) -> None:
    partial = f"{path}.partial"
    try:
        for part in parts:
            if part.copied is not None:
                part.copied.synchronize()
        save(partial, parts)
        os.replace(partial, path)
    except Exception:  # the thread's future is not looked at; who waits for the file finds none and reads the log
        log.exception("eagle3: %s could not be written", path)
        with suppress(OSError):  # on a full disk what was written of it must not stay
            os.unlink(partial)
    finally:
        os.close(lock)


def save(path: str, parts: list[HostRows]) -> None:
    """One safetensors file from the parts, without joining them.

    The library's own function copies the tensors and writes them while it holds the interpreter's lock, for which the
    scheduler would wait; this one lets go of it. The format: the header's length (8 bytes, little endian), the header
    (JSON, padded to 8 bytes), the tensors.
    """
    first = parts[0].states
    tokens = sum(len(part.states) for part in parts)
    size_ids, size = 8 * tokens, tokens * first[0].numel() * first.element_size()
    shape = [tokens, *first.shape[1:]]
    header = json.dumps({
        "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [0, size_ids]},
        "hidden_states": {
            "dtype": DTYPES[first.dtype], "shape": shape, "data_offsets": [size_ids, size_ids + size]
        },
    }).encode()  # fmt: skip
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in (*(part.token_ids for part in parts), *(part.states for part in parts)):
            file.write(tensor.view(torch.uint8).numpy().data)
