"""A machine with GPUs that are not there: NVML and nvidia-smi replaced, everything above them real.

The library is built from ``nvml/nvml.c`` and found through LD_LIBRARY_PATH, so it works in processes of their own.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

SOURCE = Path(__file__).with_name("nvml")
WORKER = Path(__file__).with_name("gpu_worker.py")
REPOSITORY = Path(__file__).resolve().parents[2]


def build_library(folder: Path) -> Path:
    """Compile the stand-in; the folder that holds it. The test is skipped where there is no compiler."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the stand-in for NVML with: install gcc, and the C library's headers with it")
    library = folder / "libnvidia-ml.so.1"
    command = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*command, "-o", str(library), str(SOURCE / "nvml.c")], check=True)
    return folder


@dataclass(frozen=True)
class Outcome:
    """How clearing the GPUs ended."""

    enough: bool
    fit: list[int]
    unfit: list[str]
    acts: list[dict[str, Any]]

    @property
    def actions(self) -> list[str]:
        return [act["action"] for act in self.acts]

    @property
    def texts(self) -> str:
        return "\n".join(act["text"] for act in self.acts)

    def __str__(self) -> str:
        return f"{', '.join(self.actions)}{'; ' if self.acts else ''}{'goes on' if self.enough else 'stops'}"


class Worker:
    """A process that loads the stand-in library through nvidia-ml-py; ``prefix`` is a command to start it with."""

    def __init__(self, library: Path, *prefix: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(WORKER)],
            cwd=REPOSITORY,
            env=environment | {**stand_in_environment(library), "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: Mapping[str, Any], on_line: Callable[[str], None]) -> dict[str, Any]:
        """The answer; ``on_line`` is called with each line of progress."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            message = json.loads(line)
            if "done" in message:
                done: dict[str, Any] = message["done"]
                return done
            on_line(message["say"])
        raise AssertionError(f"the worker ended with status {self._process.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        with self._process:
            pass


def stand_in_environment(library: Path) -> dict[str, str]:
    """What a process needs to take the stand-ins for NVML and nvidia-smi."""
    return {"LD_LIBRARY_PATH": str(library), "PATH": f"{SOURCE}{os.pathsep}{os.environ['PATH']}"}


class GpuBox:
    """A folder with a scenario and a state folder."""

    def __init__(self, folder: Path, worker: Worker) -> None:
        self.scenario = folder / "gpus"
        self.run_dir = folder / "state" / "run"
        self.kernel_log = folder / "kmsg"
        self._worker = worker

    def write(self, *lines: str) -> None:
        """Make this the state of the world, at once."""
        _put(self.scenario, lines)

    def after_reset(self, *lines: str) -> None:
        """Make resets work, once, and leave this."""
        _put(self.scenario.with_name(self.scenario.name + ".after"), lines)

    def log_xid(self, bus: str, code: int, ahead: float = 0.0) -> None:
        """Let the kernel's log say that the driver had this error now, or so many seconds ahead."""
        with self.kernel_log.open("a") as log:
            log.write(f"4,1,{int((time.monotonic() + ahead) * 1e6)},-;NVRM: Xid (PCI:{bus}): {code}, pid=7\n")

    @property
    def resets(self) -> list[str]:
        """How nvidia-smi was called."""
        calls = self.scenario.with_name(self.scenario.name + ".calls")
        return calls.read_text().splitlines() if calls.exists() else []

    def clear(
        self,
        wanted: int,
        policy: Mapping[str, Any],
        on_line: Callable[[str], None] = lambda line: None,
        *,
        alone: bool = False,
        whole: bool = True,
    ) -> Outcome:
        """Get so many GPUs free by this policy. ``whole``: as outside of containers, wherever the tests run."""
        question = {
            "environment": {"EAGLE3_NVML_SCENARIO": str(self.scenario)},
            "run_dir": str(self.run_dir),
            "wanted": wanted,
            "policy": dict(policy),
            "alone": alone,
            "whole": whole,
            "kernel_log": str(self.kernel_log),
        }
        return Outcome(**self._worker.ask(question, on_line))


def _put(path: Path, lines: Sequence[str]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text("".join(f"{line}\n" for line in lines))
    os.replace(new, path)
