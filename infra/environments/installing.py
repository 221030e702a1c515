"""Installing the packages of lock files, exactly as pinned, by uv or by pip. Standard library only.

Index, find-links, constraints, proxies and certificates are those that pip is configured with on this machine.
"""

import logging
import os
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.environments.pip_settings import (
    PipSettingsUnread,
    own_environment,
    pip_settings,
    uv_variables,
    without_index,
)

log = logging.getLogger(__name__)

TAIL_LINES = 20
SAY_EVERY_SECONDS = 10.0
NOT_FOUND = re.compile(r"No matching distribution found for ([^\s(]+)")
# pip says this of each package that a local index lacks.
NOISE = "is ignored: it is neither a file nor a directory."
# Nothing is resolved and nothing is compiled: most of what is installed is never imported.
AS_PINNED = ("--no-deps", "--only-binary=:all:")


class InstallFailed(Exception):
    """uv or pip ended with an error.

    Args:
        status: its exit status.
        tail: the last lines it printed.
    """

    def __init__(self, status: int, tail: Sequence[str]) -> None:
        text = "\n".join(tail)
        found = NOT_FOUND.search(text)
        self.not_found = found.group(1) if found else ""
        self.reason = _reason(tail) or f"exit {status}"
        super().__init__(f"exit {status}; the end of what it printed:\n{text}\n")


@dataclass(frozen=True)
class Uv:
    """uv, set up as pip is.

    Args:
        program: the executable.
        arguments: for every command.
        variables: environment variables for every command.
    """

    program: Path
    arguments: tuple[str, ...]
    variables: Mapping[str, str]

    @classmethod
    def beside_pip(cls, python: Path, cache: Path) -> "Uv":
        """The uv of an environment whose pip says where packages come from; ``cache`` is uv's own folder.

        Raises:
            InstallFailed: pip does not say it.
        """
        try:
            settings = pip_settings(python)
        except PipSettingsUnread as error:
            raise InstallFailed(1, [f"ERROR: {error}"]) from error
        arguments = ("--no-index",) if without_index(settings) else ()
        variables = uv_variables(settings, os.environ) | {"UV_CACHE_DIR": str(cache)}
        return cls(python.with_name("uv"), arguments, variables)

    def install(self, python: Path, lock: Path, what: str, held: int) -> None:
        """Install what a lock file pins; files are hard links to uv's cache where the file system has them.

        Raises:
            InstallFailed: uv did not end with 0.
        """
        command = [str(self.program), "pip", "install", f"--python={python}", *AS_PINNED, *self.arguments]
        command += ["--no-compile-bytecode", "--no-progress", "--color=never", f"--requirements={lock}"]
        follow(command, what, held, {**own_environment(), **self.variables})


def pip_install(python: Path, lock: Path, what: str, held: int) -> None:
    """Install what a lock file pins by the pip that the environment's Python has.

    Args:
        python: the environment's Python.
        lock: lock file.
        what: the start of each progress line.
        held: descriptor of the environment's lock, kept open by pip too.

    Raises:
        InstallFailed: pip did not end with 0.
    """
    command = [str(python), "-I", "-m", "pip", "install", *AS_PINNED, "--no-compile", "--no-user", "--no-input"]
    command += ["--disable-pip-version-check", "--no-warn-script-location", "--progress-bar=off", "-r", str(lock)]
    follow(command, what, held)


def follow(command: Sequence[str], what: str, held: int, environment: Mapping[str, str] | None = None) -> None:
    """Run uv or pip, saying every ten seconds what it is at.

    Args:
        command: what to run.
        what: the start of each progress line.
        held: descriptor of a lock, which lasts for as long as the command runs, whatever becomes of this process.
        environment: the command's variables; this process's own when not given.

    Raises:
        InstallFailed: it could not be started, or did not end with 0.
    """
    began = time.monotonic()
    log.info(what)
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=own_environment() if environment is None else environment,
            pass_fds=(held,),
        )
    except OSError as error:
        raise InstallFailed(127, [f"ERROR: {command[0]} does not start: {error.strerror}"]) from error
    with process:
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, tail), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                reader.join(SAY_EVERY_SECONDS)
                if reader.is_alive():
                    log.info(
                        f"{what}: {time.monotonic() - began:.0f} s, at: {tail[-1].strip() if tail else 'its start'}"
                    )
                else:
                    process.wait()
        except BaseException:
            process.kill()
            raise
        reader.join()
    if process.returncode != 0:
        raise InstallFailed(process.returncode, list(tail))
    log.info(f"{what}: done in {time.monotonic() - began:.0f} s")


def _read(lines: Iterable[str], tail: deque[str]) -> None:
    tail.extend(line.rstrip()[:400] for line in lines if line.strip() and not line.rstrip().endswith(NOISE))


def _reason(tail: Sequence[str]) -> str:
    """What pip's last ``ERROR:`` line says, or uv's ``error:`` with the causes below it."""
    for number, line in reversed(list(enumerate(tail))):
        if line.startswith("ERROR:"):
            return line.removeprefix("ERROR:").strip()
        if line.startswith("error:"):
            causes = [line.removeprefix("error:"), *tail[number + 1 :]]
            return ": ".join(cause.strip().removeprefix("cause:").strip() for cause in causes)[:300]
    return ""
