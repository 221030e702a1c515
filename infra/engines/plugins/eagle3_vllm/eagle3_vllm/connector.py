"""vLLM's hidden-states connector, made to run on CPU.

The stock connector copies through pinned memory, CUDA streams and events, which a CPU has not: it answers 200 with a
path, then its engine dies. On a CPU the states already lie in host memory, so a plain copy is complete when it returns.
Written against vllm 0.32.0, ``distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py``.
"""

import fcntl
import os
from functools import partial

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class Finished:
    """Stands for a CUDA event whose copy is complete."""

    def query(self) -> bool:
        """Always complete."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes ``hidden_states`` [tokens, ids, hidden] and ``token_ids`` int64 [tokens] of each finished request.

    The file appears under its name only when it is whole; the exclusive lock on ``<file>.lock``, held since the request
    was first scheduled, is released right after. A released lock without a file means that the write failed.
    """

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        tensors = {
            # Indexing copies, so the engine may reuse the blocks as soon as this returns.
            "hidden_states": extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).contiguous(),
            "token_ids": pending.token_ids.clone(),
        }
        done = Finished()
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    @staticmethod
    def _write_tensors(tensors: dict[str, torch.Tensor], event: Finished, filename: str, lock_fd: int | None) -> None:
        partial_name = filename + ".partial"
        try:
            save_file(tensors, partial_name)
            os.replace(partial_name, filename)
        except BaseException:
            # Half a file would keep the room of which it did not find enough.
            if os.path.exists(partial_name):
                os.unlink(partial_name)
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)
