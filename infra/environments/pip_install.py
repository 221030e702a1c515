"""Running pip: pinned packages into an environment, with progress, by the machine's own pip configuration.

Standard library only. Index, find-links, constraints, proxies and certificates are pip's business: its environment
variables and configuration files are left to work as they do for any other pip.
"""

import os
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

TAIL_LINES = 20
SAY_EVERY_SECONDS = 10.0
NOT_FOUND = re.compile(r"No matching distribution found for ([^\s(]+)")
# Said for each package that a local index lacks.
NOISE = "is ignored: it is neither a file nor a directory."
# Of the caller's Python, not of the one that pip installs into.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


class Progress:
    """How far pip is, from what it prints, and its last lines."""

    def __init__(self) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.collected = 0
        self.installing = False

    def read(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.collected += line.startswith(("Collecting ", "Processing "))
            self.installing |= line.startswith("Installing collected packages")
            if line.strip() and not line.rstrip().endswith(NOISE):
                self.tail.append(line.rstrip()[:400])

    def __str__(self) -> str:
        return f"{self.collected} packages collected{', installing them' if self.installing else ''}"


class PipFailed(Exception):
    """pip ended with an error.

    Args:
        status: its exit status.
        tail: the last lines it printed.
    """

    def __init__(self, status: int, tail: Sequence[str]) -> None:
        text = "\n".join(tail)
        found = NOT_FOUND.search(text)
        self.not_found = found.group(1) if found else ""
        errors = [line for line in tail if line.startswith("ERROR:")]
        self.reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit {status}"
        super().__init__(f"exit {status}; the end of what it printed:\n{text}\n")


def pip_environment() -> dict[str, str]:
    """This process's environment without what belongs to another Python."""
    return {name: value for name, value in os.environ.items() if name not in FOREIGN}


def run_pip(python: Path, locks: Sequence[Path], what: str, say: Callable[[str], None], held: int) -> None:
    """Install the packages of lock files, exactly as pinned: nothing is resolved, nothing is compiled.

    Byte code is left to the first import: most of what is installed is never imported.

    Args:
        python: the environment's Python, which has pip.
        locks: lock files.
        what: the start of each progress line.
        held: descriptor of the environment's lock, kept open by pip too.

    Raises:
        PipFailed: pip did not end with 0.
    """
    command = [
        str(python),
        "-I",
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-compile",
        "--only-binary=:all:",
        "--no-user",
    ]
    command += ["--no-input", "--disable-pip-version-check", "--no-warn-script-location", "--progress-bar=off"]
    for lock in locks:
        command += ["-r", str(lock)]
    follow(command, what, say, held)


def follow(command: Sequence[str], what: str, say: Callable[[str], None], held: int) -> None:
    """Run pip, saying every ten seconds how far it is.

    Raises:
        PipFailed: it did not end with 0.
    """
    began = time.monotonic()
    say(what)
    progress = Progress()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=pip_environment(),
        pass_fds=(held,),
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=progress.read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                reader.join(SAY_EVERY_SECONDS)
                if reader.is_alive():
                    say(f"{what}: {progress}, {time.monotonic() - began:.0f} s")
                else:
                    process.wait()
        except BaseException:
            process.kill()
            raise
        reader.join()
    if process.returncode != 0:
        raise PipFailed(process.returncode, progress.tail)
    say(f"{what}: done in {time.monotonic() - began:.0f} s")
