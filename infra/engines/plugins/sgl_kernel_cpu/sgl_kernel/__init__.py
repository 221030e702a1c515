"""Stands in for SGLang's kernels, which have no release for CPUs.

With ``--attention-backend torch_native`` a Llama-like target is served by torch alone, but for one function.
"""

from collections.abc import Callable

import torch


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, pool: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, width: int
) -> None:
    """Note where the KV cache has the tokens ``starts[i]`` to ``ends[i]`` of each request.

    Args:
        rows: int [requests], the requests' rows in the pool.
        pool: int32 [rows, tokens], changed in place.
        starts: int [requests], first token, by request.
        ends: int [requests], one past the last.
        places: int [all tokens], their places in the KV cache, request after request.
        width: the pool's row length, which torch knows itself.
    """
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        pool[row, start:end] = places[done : done + end - start].to(pool.dtype)
        done += end - start


def __getattr__(name: str) -> Callable[..., None]:
    """Every other function, for imports; one that is called stops the server."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: object, **options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in: SGLang's kernels have no release for CPUs")

    return missing
