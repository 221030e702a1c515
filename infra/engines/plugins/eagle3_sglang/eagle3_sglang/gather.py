"""The rows of one request, chunk by chunk, until they cover all of its tokens exactly once."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class HostRows:
    """Rows on their way to, or in, host memory.

    Args:
        states: [tokens, layers + 1, hidden] in the engine's dtype; the last is the final state after the norm.
        token_ids: int64 [tokens], the tokens that the forward was given.
        copied: the end of the copy on the device's stream; None when there was none.
    """

    states: torch.Tensor
    token_ids: torch.Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def copy(cls, states: torch.Tensor, token_ids: torch.Tensor) -> "HostRows":
        """Copy in stream order, without waiting: the forward's buffers may be used again as soon as this returns."""
        if not states.is_cuda:
            return cls(states, token_ids.to(torch.int64, copy=True), None)
        host, host_ids = states.to("cpu", non_blocking=True), token_ids.to(torch.int64).to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return cls(host, host_ids, copied)

    def __getitem__(self, rows: slice) -> "HostRows":
        return HostRows(self.states[rows], self.token_ids[rows], self.copied)


@dataclass
class Gather:
    """What one request has so far; lives and dies with it."""

    parts: list[HostRows] = field(default_factory=list)
    _end: int = 0
    _fault: str = ""

    def add(self, start: int, length: int, rows: "HostRows | str") -> None:
        """Take the rows of tokens ``start`` to ``start + length``, or the reason why there are none."""
        if self._fault:
            return
        if start != self._end:
            self._fault = (
                f"tokens {self._end} to {start} were not computed but taken from the prefix cache: "
                "start with --disable-radix-cache"
            )
        elif isinstance(rows, str):
            self._fault = rows
        else:
            self.parts.append(rows)
        self._end = start + length

    def fault(self, total: int) -> str:
        """Why the states of ``total`` tokens are not complete; empty when they are."""
        found = sum(len(part.states) for part in self.parts)
        return self._fault or (f"there are {found} rows for {total} tokens" if found != total else "")
