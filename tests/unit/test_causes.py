"""What the end of a log says: one sentence, and the remedy.

What Python and the system say is produced here; an engine's words are those of ``standin.wordings``, which
``tests/live/engines`` looks up in the engines; what a GPU's driver and torch say under both are single lines.
"""

import argparse
import errno
import os
import socket
from collections.abc import Callable
from importlib import import_module

import pytest
from standin.wordings import WORDINGS, Wording

from infra.engines.server.causes import explain, port_was_taken

ON_GPUS = [
    ("RuntimeError: CUDA error: out of memory", ("there was not enough memory", "max_model_len")),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", ("not enough memory", "parallelism")),
    (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        ("does not fit the GPU or its driver", "nvidia-smi"),
    ),
]


def see(log: str, parts: tuple[str, str]) -> None:
    """Check what is said of a log with such an end."""
    said = explain(f"INFO all was well\n{log}\n") or ""
    happened, _, remedy = said.partition("; ")
    assert parts[0] in happened
    assert parts[1] in remedy
    assert "\n" not in said
    assert "  " not in said


@pytest.mark.parametrize(("log", "parts"), ON_GPUS)
def test_a_known_fault_of_gpus_is_one_sentence_with_its_remedy(log: str, parts: tuple[str, str]) -> None:
    see(log, parts)


@pytest.mark.parametrize("wording", WORDINGS, ids=lambda wording: wording.words)
def test_an_engines_known_fault_is_one_sentence_with_its_remedy(wording: Wording) -> None:
    see(wording.line, wording.said)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--no-such-flag", "3"], ("does not know the flags --no-such-flag 3", "rung's flags")),
        (["--dtype", "f8"], ("a flag is wrong: --dtype", "ladder")),
    ],
)
def test_a_wrong_flag_is_named(
    arguments: list[str], parts: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser(prog="api_server.py")
    parser.add_argument("--dtype", choices=["auto"])
    with pytest.raises(SystemExit):
        parser.parse_args(arguments)
    see(capsys.readouterr().err, parts)


def take_a_port_twice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        socket.create_server(first.getsockname())


def fill_shared_memory() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/shm/psm")


@pytest.mark.parametrize(
    ("fail", "parts"),
    [
        (take_a_port_twice, ("its port was taken by another process", "another free port")),
        (fill_shared_memory, ("a disk is full", "/dev/shm")),
        (lambda: import_module("no_such_kernel"), ("not complete: No module named", "engines install")),
    ],
    ids=["port", "disk", "module"],
)
def test_a_fault_of_the_machine_is_one_sentence_with_its_remedy(
    fail: Callable[[], object], parts: tuple[str, str]
) -> None:
    with pytest.raises((OSError, ImportError)) as caught:
        fail()
    see(f"{type(caught.value).__name__}: {caught.value}", parts)
    assert port_was_taken(str(caught.value)) == ("port" in parts[0])


def test_arguments_in_a_log_are_no_faults() -> None:
    log = "server_args=ServerArgs(trust_remote_code=True, mem_fraction_static=0.8)\nnon-default args: {'port': 98}"
    assert explain(log) is None


def test_an_unknown_fault_is_told_by_its_own_last_error() -> None:
    log = "ValueError: head size 80\nINFO\nRuntimeError: Engine core initialization failed. See root cause above."
    assert explain(log, hollow="Engine core initialization failed") == "ValueError: head size 80"
    assert explain(log) == "RuntimeError: Engine core initialization failed. See root cause above."


def test_only_a_lost_port_is_no_fault_of_the_rung() -> None:
    assert port_was_taken("[Errno 98] error while attempting to bind on address: address already in use")
    assert not port_was_taken("CUDA out of memory")
