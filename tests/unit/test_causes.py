"""What the end of a log says: one sentence, and the remedy. The lines are single wordings, not whole recorded logs."""

import pytest

from infra.engines.server.causes import explain, port_was_taken

CASES = [
    (
        "(APIServer pid=1) OSError: [Errno 98] Address already in use",
        ("its port was taken by another process", "another free port"),
    ),
    (
        "api_server.py: error: unrecognized arguments: --no-such-flag 3",
        ("does not know the flags --no-such-flag 3", "rung's flags"),
    ),
    ("launch_server.py: error: argument --dtype: invalid choice: 'f8'", ("a flag is wrong: --dtype", "ladder")),
    (
        "ValueError: Invalid repository ID or local directory specified: '/models/x'.",
        ("the model's folder is missing or not complete '/models/x'", "eagle3 target fetch"),
    ),
    (
        "OSError: /models/x does not appear to have a file named config.json.",
        ("missing or not complete config.json", "eagle3 target"),
    ),
    ("RuntimeError: CUDA error: out of memory", ("there was not enough memory", "max_model_len")),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", ("not enough memory", "parallelism")),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", ("not enough memory", "free")),
    (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        ("does not fit the GPU or its driver", "nvidia-smi"),
    ),
    (
        "ValueError: The repository contains custom code which must be executed to correctly load the model.",
        ("needs its own code", "target.trust_remote_code"),
    ),
    ("OSError: [Errno 28] No space left on device: '/dev/shm/psm'", ("a disk is full", "/dev/shm")),
    ("ModuleNotFoundError: No module named 'sgl_kernel'", ("not complete: No module named", "engines install")),
]


@pytest.mark.parametrize(("log", "parts"), CASES)
def test_a_known_fault_is_one_sentence_with_its_remedy(log: str, parts: tuple[str, str]) -> None:
    said = explain(f"INFO all was well\n{log}\n") or ""
    happened, _, remedy = said.partition("; ")
    assert parts[0] in happened
    assert parts[1] in remedy
    assert "\n" not in said
    assert "  " not in said


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
