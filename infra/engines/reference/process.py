"""The reference: transformers in a process of its own, the ground truth of the convention gate.

It shares no code with the engines' extraction: the target's own forward pass runs, and hooks keep what enters each
decoder layer. What runs in the child is :mod:`infra.engines.reference.entry`.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch
from safetensors.torch import load_file

from infra.config.settings import Settings
from infra.errors import EngineError
from infra.machine.gpus.choice import VISIBLE, device_environment
from infra.machine.logtail import last_lines
from infra.machine.processes.guarded import Guarded, Spec, clean_environment, forward_environment
from infra.targets.target import Target

ReferenceMode = Literal["auto", "whole", "streamed"]


class ReferenceUnavailable(EngineError):
    """This target cannot be computed by the reference on this machine; the sentence says why."""


@dataclass(frozen=True)
class ReferenceStates:
    """What the target computes for one token sequence.

    Args:
        hidden: float32 [tokens, L + 1, hidden], taps 0 to L; tap L is pre-norm.
        normed: float32 [tokens, hidden], tap L after the target's own final norm.
        next_tokens: int64 [tokens], the most probable token after each position.
    """

    hidden: torch.Tensor
    normed: torch.Tensor
    next_tokens: torch.Tensor


class Reference:
    """Computes reference states; a context manager, at whose end nothing is left in scratch.

    Args:
        target: the target's folder.
        settings: where scratch and pid files go.
        mode: ``whole`` loads the target; ``streamed`` holds one decoder layer at a time; ``auto`` takes the first that
            fits in memory.
        device: ``cuda`` uses a GPU (bfloat16) when the whole target fits beside what is there, else the CPU (float32).
        devices: GPUs to choose from, as CUDA_VISIBLE_DEVICES names them; empty for whatever this process sees.
        scratch: where its working folder is made; empty: the machine's scratch.
        timeout: longest time for one call of :meth:`states`, seconds.
    """

    def __init__(
        self,
        target: Target,
        settings: Settings,
        mode: ReferenceMode = "auto",
        device: Literal["cpu", "cuda"] = "cpu",
        devices: tuple[str, ...] = (),
        scratch: Path | None = None,
        timeout: float = 3600.0,
    ) -> None:
        self._target, self._settings, self._mode, self._timeout = target, settings, mode, timeout
        self._device, self._devices = device, devices
        self._scratch = scratch or settings.scratch_dir
        self._folder: Path | None = None
        self.how = ""
        """How the last call computed: ``whole, float32 on cpu``."""

    def states(self, sequences: Sequence[Sequence[int]]) -> list[ReferenceStates]:
        """Every tap of every token, one entry a sequence.

        Raises:
            ReferenceUnavailable: the target does not fit in memory or cannot be loaded by these means.
            EngineError: the process failed.
        """
        if self._folder is None:
            raise EngineError("the reference was asked outside its `with` block")
        request, answer, tensors = (
            self._folder / name for name in ("request.json", "answer.json", "reference.safetensors")
        )
        question = {
            "target": str(self._target.path),
            "trust_remote_code": self._target.trust_remote_code,
            "mode": self._mode,
            "device": self._device,
            "sequences": [list(sequence) for sequence in sequences],
        }
        request.write_text(json.dumps(question))
        self._run((str(request), str(answer), str(tensors)))
        said = json.loads(answer.read_text())
        if "refused" in said:
            raise ReferenceUnavailable(f"no reference for target {self._target.name}: {said['refused']}")
        self.how = said["how"]
        return _unpacked(tensors, [len(sequence) for sequence in sequences])

    def _run(self, files: tuple[str, ...]) -> None:
        folder = Path(files[0]).parent
        devices = device_environment(self._devices) if self._device == "cuda" else {VISIBLE: ""}
        spec = Spec(
            command=(sys.executable, "-m", "infra.engines.reference.entry", *files),
            purpose="reference",
            log=folder / "reference.log",
            env=clean_environment(forward_environment() | devices),
            cwd=folder,
        )
        with Guarded.start(spec, self._settings.run_dir) as process:
            status = process.wait(timeout=self._timeout)
        if status != 0:
            found = f"took longer than {self._timeout:.0f} s" if status is None else f"ended with status {status}"
            raise EngineError(
                f"the reference of target {self._target.name} {found}: {last_lines(spec.log, 15)}",
                fix="lower gates.convention.samples and .tokens, or set gates.convention.reference (`streamed` takes "
                "least memory; `none` goes without, and the report says so)",
            )

    def __enter__(self) -> Self:
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="reference-", dir=self._scratch))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _unpacked(file: Path, lengths: list[int]) -> list[ReferenceStates]:
    """Sequences were computed side by side, padded at their ends."""
    tensors = load_file(file)
    return [
        ReferenceStates(
            hidden=tensors["hidden"][index, :length].float(),
            normed=tensors["normed"][index, :length].float(),
            next_tokens=tensors["next_tokens"][index, :length],
        )
        for index, length in enumerate(lengths)
    ]
