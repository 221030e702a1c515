"""From the tensors of one forward to the rows of each request."""

import json
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.runtime_context import get_parallel

from .digest import digest
from .gather import Gather, HostRows
from .writer import Writer

PREFIX = "eagle3-"
"""Requests whose ``rid`` starts so are captured."""
KEY = "eagle3"
"""Where a reply's ``meta_info`` tells what became of the states: a list of one JSON text."""
ARGUMENTS = ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states")


class Capture:
    """Captures on one rank.

    Every rank of a tensor-parallel group must compute the states (their collectives take part in them); the group's
    first rank, which owns the requests of its data-parallel share, writes them.

    Args:
        model: the loaded target.
        layer_ids: for ``set_eagle3_layers_to_capture``, as serving a draft would hand them over.
        staging: the folder for the files.
    """

    def __init__(self, model: torch.nn.Module, layer_ids: list[int], staging: Path) -> None:
        parallel = get_parallel()
        if parallel.pp_size != 1:
            raise RuntimeError("eagle3: states cannot be captured under pipeline parallelism; start with pp size 1")
        set_layers = getattr(model, "set_eagle3_layers_to_capture", None)
        processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
        if set_layers is None or not processors:
            raise RuntimeError(f"eagle3: {type(model).__name__} cannot capture layers in this version of SGLang")
        set_layers(list(layer_ids))
        for processor in processors:
            processor.register_forward_pre_hook(self._note, with_kwargs=True)
        self._layers = len(layer_ids)
        self._report = {"plugin": digest(), "layer_ids": list(layer_ids)}
        self._writer = Writer(staging) if parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0 else None
        self._noted: dict[str, Any] | None = None

    def _note(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the logits processor is called with: every row of the forward, the final norm already applied."""
        self._noted = dict(zip(ARGUMENTS, args, strict=False)) | kwargs

    def begin(self) -> None:
        """Forget what another forward left, such as a warm-up's."""
        self._noted = None

    def end(self, batch: Any, result: Any) -> None:
        """Give the rows of a ``ScheduleBatch`` to their requests; finished ones go to disk and into the reply."""
        noted, self._noted, writer = self._noted, None, self._writer
        if writer is None or not batch.forward_mode.is_extend_without_speculative():
            return
        if not any(request.rid.startswith(PREFIX) for request in batch.reqs):
            return
        rows = self._to_host(noted, sum(batch.extend_lens))
        reports: list[str | None] = []
        offset = 0
        for request, start, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            mine = rows[offset : offset + length] if isinstance(rows, HostRows) else rows
            wanted = request.rid.startswith(PREFIX)
            reports.append(self._give(request, start, length, mine, writer) if wanted else None)
            offset += length
        if any(reports):
            result.logits_output.customized_info = {**(result.logits_output.customized_info or {}), KEY: reports}

    def _give(self, request: Any, start: int, length: int, rows: "HostRows | str", writer: Writer) -> str | None:
        """Add a chunk to its request; at the last one, start writing. Returns the reply's text, None before the end."""
        gather: Gather | None = getattr(request, KEY, None)
        if gather is None or start == 0:
            gather = Gather()
            setattr(request, KEY, gather)
        total = len(request.origin_input_ids)
        if start >= total:  # a token that was generated
            return None
        gather.add(start, length, rows)
        if start + length < total:
            return None
        fault = gather.fault(total)
        outcome = {"error": fault} if fault else {"file": str(writer.write(request.rid, gather.parts))}
        gather.parts = []
        return json.dumps({**self._report, **outcome})

    def _to_host(self, noted: dict[str, Any] | None, tokens: int) -> "HostRows | str":
        """The first ``tokens`` rows (padding follows) on the host, or the sentence that says why there are none."""
        if noted is None:
            return (
                "the forward did not run the target's own code, as under a CUDA graph: start with --disable-cuda-graph"
            )
        final, captured = noted["hidden_states"], noted.get("aux_hidden_states")
        layers = [] if captured is None else captured
        if isinstance(layers, torch.Tensor):  # some models pack [tokens, layers * hidden]
            layers = layers.unflatten(-1, (-1, final.shape[-1])).unbind(1)
        if len(layers) != self._layers:
            return f"the target captured {len(layers)} of the {self._layers} layers {self._report['layer_ids']}"
        states = [*layers, final]
        if any(state.shape != final.shape for state in states) or len(final) < tokens:
            return f"the forward gave {[len(state) for state in states]} rows for {tokens} tokens"
        ids: torch.Tensor = noted["logits_metadata"].input_ids
        return HostRows.copy(torch.stack([state[:tokens] for state in states], 1), ids[:tokens])
